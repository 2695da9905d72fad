package scrape

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// found is one emitted sample, written out.
type found struct {
	id     int
	labels string
	value  float64
}

func scanAll(page string, names ...string) ([]found, Stats) {
	var out []found
	st := Scan([]byte(page), NewNameTable(names...), func(id int, labels []byte, v float64) {
		out = append(out, found{id, string(labels), v})
	})
	return out, st
}

// TestScanKeepsGoodLines feeds what makes the reference parser give up
// (prometheus/common #703, #1135, #1469, prometheus #12975 and others): the
// lines around the fault must all be there.
func TestScanKeepsGoodLines(t *testing.T) {
	for name, tc := range map[string]struct {
		line string
		want []float64 // of the line itself
		bad  int
	}{
		"plain":                   {`m 2`, []float64{2}, 0},
		"exemplar":                {`m{le="1"} 2 # {trace_id="x"} 0.5 1.2`, []float64{2}, 0},
		"exemplar after stamp":    {`m 2 1700000000 # {} 1`, []float64{2}, 0},
		"trailing blank":          {"m 2 ", []float64{2}, 0},
		"CRLF":                    {"m 2\r", []float64{2}, 0},
		"second TYPE":             {"# TYPE m gauge\n# TYPE m gauge\nm 2", []float64{2}, 0},
		"second HELP":             {"# HELP m a\n# HELP m b\nm 2", []float64{2}, 0},
		"float timestamp":         {"m 2 1.7e9", []float64{2}, 0},
		"overflow":                {"m 1e309", nil, 1},
		"blank value":             {"m ", nil, 1},
		"no value":                {"m{a=\"b\"}", nil, 1},
		"bad UTF-8":               {"m{a=\"\xff\"} 2", []float64{2}, 0},
		"bad escape":              {`m{a="\q"} 2`, []float64{2}, 0},
		"duplicate label":         {`m{a="1",a="2"} 2`, []float64{2}, 0},
		"NaN":                     {"m NaN", []float64{math.NaN()}, 0},
		"infinity":                {"m +Inf", []float64{math.Inf(1)}, 0},
		"sentinel":                {"m 9223372036854775792", []float64{9223372036854775792}, 0},
		"EOF mark":                {"# EOF", nil, 0},
		"brace in a label":        {`m{a="}{",b="\"}"} 2`, []float64{2}, 0},
		"unclosed brace":          {`m{a="b" 2`, nil, 1},
		"unclosed quote":          {`m{a="b} 2`, nil, 1},
		"tabs":                    {"\tm\t{a=\"b\"}\t2\t3", []float64{2}, 0},
		"no blank before value":   {`m{a="b"}2`, []float64{2}, 0},
		"words after the value":   {`m 2 two`, nil, 1},
		"hexadecimal":             {`m 0x1p4`, nil, 1},
		"digit separators":        {`m 1_000`, nil, 1},
		"another name":            {`mm 2`, nil, 0},
		"a name that starts so":   {`m_total 2`, nil, 0},
		"binary junk":             {"\x00\x01\x02", nil, 0},
		"number of 2,000 digits":  {"m " + strings.Repeat("1", 2000), nil, 1},
		"same name, other labels": {"m{a=\"1\"} 2\nm{a=\"2\"} 3", []float64{2, 3}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			page := "m 1\n" + tc.line + "\nm 9" // the last line without its end
			got, st := scanAll(page, "x", "m")
			var values []float64
			for _, f := range got {
				if f.id != 1 {
					t.Errorf("id %d", f.id)
				}
				values = append(values, f.value)
			}
			want := append([]float64{1}, append(slices.Clone(tc.want), 9)...)
			if !slices.EqualFunc(values, want, sameFloat) || st.Bad != tc.bad || st.Samples != len(want) {
				t.Errorf("got %v, %+v; want %v and %d bad", values, st, want, tc.bad)
			}
		})
	}
}

func sameFloat(a, b float64) bool { return a == b || math.IsNaN(a) && math.IsNaN(b) }

func TestLabel(t *testing.T) {
	labels := []byte(`engine="0", model_name="a\"b=,}" ,gpu="",UUID="GPU-1"`)
	for name, want := range map[string]string{"engine": "0", "model_name": `a\"b=,}`, "gpu": "", "UUID": "GPU-1"} {
		if got := Label(labels, name); got == nil || string(got) != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for _, broken := range []string{"", "x", `x="`, `x=1`, `="`, `other="engine"`} {
		if got := Label([]byte(broken), "engine"); got != nil {
			t.Errorf("%q: %q, want nothing", broken, got)
		}
	}
}

// oracle reads a page with the reference parser, as untyped samples. ok is
// false where that parser refuses the page.
func oracle(page []byte, names []string) (values map[string][]float64, ok bool) {
	var plain []byte
	for line := range bytes.Lines(page) {
		if l := skipBlanks(line); len(l) > 0 && (l[0] == '#' || l[0] == '{') {
			// TYPE lines would fold series into histograms; names inside braces
			// are out of scope.
			if l[0] == '{' {
				return nil, false
			}
			continue
		}
		plain = append(plain, line...)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(plain))
	if err != nil {
		return nil, false
	}
	values = map[string][]float64{}
	for _, n := range names {
		for _, m := range families[n].GetMetric() {
			values[n] = append(values[n], untyped(m))
		}
	}
	return values, true
}

func untyped(m *dto.Metric) float64 { return m.GetUntyped().GetValue() }

func FuzzScan(f *testing.F) {
	for _, seed := range []string{
		"", "\n", "m 1\n", "m 1", "vllm:num_requests_running{engine=\"0\",model_name=\"a\"} 3.0\n",
		"m{a=\"}\"} 2 1700000000000\nm{a=\"\\\"\\n\\\\\"} NaN\n", "m 1 # {a=\"b\"} 2\n", "m 1 \n", "m 1\r\n",
		"# HELP m x\n# TYPE m counter\nm 1\n# EOF\n", "m 1.5 1.7e9\n", "m 1e309\n", "m \n", "m{a=\"\xff\"} 1\n",
		"m{a=\"1\",a=\"2\"} 1\n", "m+5\nm-5\nm{}5\n", "m{\n", "m{a=\"", "m 0x1p-2\n", "m 1_0\n", "m Inf\nm -inf\n",
		"mm 1\nm{,} 1\n m 2\n", "{\"m\"} 1\n", "m{\"a b\"=\"c\"} 1\n", "_x 1\nm 1 1 1\n",
	} {
		f.Add([]byte(seed))
	}
	names := []string{"m", "vllm:num_requests_running", "_x"}
	table := NewNameTable(names...)
	f.Fuzz(func(t *testing.T, page []byte) {
		got := map[string][]float64{}
		st := Scan(page, table, func(id int, labels []byte, v float64) {
			Label(labels, "engine")
			got[names[id]] = append(got[names[id]], v)
		})
		if st.Samples+st.Bad > st.Lines {
			t.Fatalf("more samples than lines: %+v", st)
		}
		readEngine(page)
		gpus := newGPUPage([]string{"GPU-1", "GPU-2/3"})
		gpus.read(page, time.Now())
		gpus.read(page, time.Now())
		want, ok := oracle(page, names)
		if !ok {
			return
		}
		for _, n := range names {
			if !slices.EqualFunc(got[n], want[n], sameFloat) {
				t.Fatalf("%s: scan %v, reference %v", n, got[n], want[n])
			}
		}
		if st.Bad != 0 {
			t.Fatalf("%d bad lines on a page that the reference parser accepts", st.Bad)
		}
		// A fault of its own line must not cost the others.
		spoilt := append([]byte("m{a=\"\n"), page...)
		again := 0
		if Scan(spoilt, table, func(int, []byte, float64) { again++ }); again != st.Samples {
			t.Fatalf("%d samples after a bad line, %d without it", again, st.Samples)
		}
	})
}

// vllmPage is a page of the size and make-up that a vLLM server shows: some
// 2,000 lines, mostly histogram buckets, about 200 kB.
func vllmPage() []byte {
	var b bytes.Buffer
	const labels = `engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"`
	for _, g := range []string{"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} {
		fmt.Fprintf(&b, "# HELP %s A number.\n# TYPE %s gauge\n%s{%s} 0.5\n", g, g, g, labels)
	}
	for _, c := range []string{"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"} {
		fmt.Fprintf(&b, "# HELP %s A number.\n# TYPE %s counter\n%s{%s} 12345.0\n", c, c, c, labels)
	}
	histogram := func(name string, buckets int) {
		fmt.Fprintf(&b, "# HELP %s Histogram of something in seconds.\n# TYPE %s histogram\n", name, name)
		for i := range buckets {
			fmt.Fprintf(&b, "%s_bucket{%s,le=\"%d.0\"} %d.0\n", name, labels, i, 10*i)
		}
		fmt.Fprintf(&b, "%s_count{%s} 100.0\n%s_sum{%s} 50.5\n", name, labels, name, labels)
	}
	histogram("vllm:time_to_first_token_seconds", 22)
	for i := 0; b.Len() < 204_000; i++ {
		histogram(fmt.Sprintf("vllm:request_phase_%d_time_seconds", i), 20)
	}
	return b.Bytes()
}

func TestReadingAPageAllocatesNothing(t *testing.T) {
	page := vllmPage()
	var r reading
	if n := testing.AllocsPerRun(100, func() { r = readEngine(page) }); n != 0 {
		t.Fatalf("%v allocations per page", n)
	}
	if r.stats.Samples != 8 || r.rejected != 0 {
		t.Fatalf("%+v", r.stats)
	}
	gpus, s, now := newGPUPage(nil), telemetry.Sample{}, time.Now()
	other := nodePage(8)
	s.SetGPUs(gpus.read(other, now)) // meets its GPUs
	if n := testing.AllocsPerRun(100, func() { s.SetGPUs(gpus.read(other, now)) }); n != 0 {
		t.Fatalf("%v allocations per GPU page", n)
	}
	if len(gpus.gpus) != 8 || !s.Known.Has(telemetry.HasGRActive|telemetry.HasFBTotal|telemetry.HasXID) {
		t.Fatalf("%d GPUs, known %b", len(gpus.gpus), s.Known)
	}
}

// BenchmarkScan is to stay at or below 60 µs on one core of a 2020s server.
func BenchmarkScan(b *testing.B) {
	page := vllmPage()
	names := NewNameTable("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
		"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total",
		"vllm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_count")
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		n = Scan(page, names, func(int, []byte, float64) {}).Samples
	}
	if n != 8 {
		b.Fatalf("%d samples", n)
	}
}

func BenchmarkReadEnginePage(b *testing.B) {
	page := vllmPage()
	b.ReportAllocs()
	for b.Loop() {
		readEngine(page)
	}
}

// nodePage is what dcgm-exporter's default list of fields shows of a node: some
// 40 names for each GPU.
func nodePage(gpus int) []byte {
	var b bytes.Buffer
	series := func(name string, value float64) {
		fmt.Fprintf(&b, "# HELP %s Something about a GPU.\n# TYPE %s gauge\n", name, name)
		for i := range gpus {
			fmt.Fprintf(&b, "%s{gpu=\"%d\",UUID=\"GPU-8a3b1c2d-0000-4000-8000-%012d\",pci_bus_id=\"00000000:1B:00.0\",device=\"nvidia%d\","+
				"modelName=\"NVIDIA H100 80GB HBM3\",Hostname=\"gpu-node-7\",DCGM_FI_DRIVER_VERSION=\"570.86.15\"} %v\n", name, i, i, i, value)
		}
	}
	for name, value := range map[string]float64{
		"DCGM_FI_DEV_GPU_UTIL": 97, "DCGM_FI_DEV_FB_USED": 74_000, "DCGM_FI_DEV_FB_FREE": 6_900, "DCGM_FI_DEV_FB_RESERVED": 600,
		"DCGM_FI_DEV_POWER_USAGE": 512.3, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 123456789, "DCGM_FI_DEV_XID_ERRORS": 0,
		"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.91, "DCGM_FI_PROF_DRAM_ACTIVE": 0.44, "DCGM_FI_PROF_PCIE_TX_BYTES": 1.5e9,
		"DCGM_FI_PROF_PCIE_RX_BYTES": 2.5e9, "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
	} {
		series(name, value)
	}
	for i := range 25 {
		series(fmt.Sprintf("DCGM_FI_DEV_OTHER_FIELD_%d", i), 12345)
	}
	return b.Bytes()
}

func BenchmarkReadGPUPage(b *testing.B) {
	page, gpus, now := nodePage(8), newGPUPage(nil), time.Now()
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	var s telemetry.Sample
	for b.Loop() {
		s.SetGPUs(gpus.read(page, now))
	}
}

// BenchmarkScanAgainstReference reads the same page by the scanner and by
// prometheus/common in turn; the ratio does not depend on how busy the machine
// is.
func BenchmarkScanAgainstReference(b *testing.B) {
	page := vllmPage()
	var own, reference time.Duration
	for b.Loop() {
		begin := time.Now()
		for range 16 {
			readEngine(page)
		}
		own += time.Since(begin) / 16
		begin = time.Now()
		parser := expfmt.NewTextParser(model.UTF8Validation)
		if _, err := parser.TextToMetricFamilies(bytes.NewReader(page)); err != nil {
			b.Fatal(err)
		}
		reference += time.Since(begin)
	}
	b.ReportMetric(float64(own.Microseconds())/float64(b.N), "µs/page")
	b.ReportMetric(float64(reference)/float64(own), "x-faster")
}
