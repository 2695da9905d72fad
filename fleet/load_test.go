package fleet

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite the expected files in testdata")

func TestFullFileIsReadCompletely(t *testing.T) {
	c, err := Load("testdata/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, got, want any) {
		t.Helper()
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %v, want %v", what, got, want)
		}
	}
	check("xds", c.Serve.XDS, Address{Path: "/run/fairlead/xds.sock"})
	check("extproc", c.Serve.ExtProc, Address{Host: "127.0.0.1:9902"})
	check("accessLog", c.Serve.AccessLog, Address{Host: "10.0.0.5:9903", Plaintext: true})
	check("admin", c.Serve.Admin, Address{Host: "127.0.0.1:9900"})
	check("shard", c.Serve.Shard, 7)
	edge := c.Groups[0]
	check("listener http2", edge.Listener.HTTP2, HTTP2{64 << 10, 1 << 20, 256})
	check("peekDigits", edge.Listener.PeekDigits, 7)
	check("drainTime", edge.Listener.DrainTime, 90*time.Minute)
	check("uploadTimeout", edge.Listener.UploadTimeout, 30*time.Second)
	check("trusted", edge.Listener.TrustedCIDRs[1].String(), "2001:db8::/32")
	check("group routes", edge.Routes, []string{"messages", "chat-connect", "chat"})
	check("IPv6 listener", c.Groups[1].Listener.Address.String(), "[::1]:8081")
	h100 := c.Pools[0]
	check("tier", h100.Tier, "large")
	check("protocol", h100.Protocol, H2C)
	check("pool http2", h100.HTTP2, HTTP2{1 << 20, 16 << 20, 1024})
	check("gpus", h100.Endpoints[0].GPUs, []string{"GPU-8a3b", "GPU-8a3c"})
	check("capacity", h100.Endpoints[1].Capacity, 1.5)
	check("maxInFlight", h100.MaxInFlight, 128)
	check("healthCheck", *h100.HealthCheck, HealthCheck{"/healthz", 2 * time.Second, 750 * time.Millisecond, 3, 2})
	check("outlierDetection", h100.OutlierDetection, true)
	check("telemetry", h100.Telemetry, Telemetry{TelemetryScrape, 250 * time.Millisecond, "/metrics", "/gpu/metrics", 9400})
	messages := c.Routes[0]
	check("match", messages.Match, Match{Prefix: "/v1/messages", Model: "llama-3.1-8b"})
	check("split", messages.Split, Split{{"h100", 10}, {"a100", 90}})
	check("fallback", messages.Fallback, []string{"spare"})
	check("firstToken", messages.Timeouts.FirstToken, 15*time.Second)
	check("bodies", []Bytes{messages.RetryBody, messages.MaxBody}, []Bytes{4 << 20, 16e6})
	connect := c.Routes[1]
	check("connect", connect.Match.Connect, true)
	check("strategies", []any{connect.Strategy, connect.ClientStrategy}, []any{StrategyLegacy, ClientStrategyIgnore})
	check("trustDeclared", connect.TrustDeclared, true)
	check("digest length", len(c.Digest), 64)
}

func TestDefaults(t *testing.T) {
	c, err := Load("testdata/good/minimal.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		Serve: Serve{
			XDS:       Address{Path: "/run/fairlead/xds.sock"},
			ExtProc:   Address{Path: "/run/fairlead/extproc.sock"},
			AccessLog: Address{Path: "/run/fairlead/accesslog.sock"},
			Admin:     Address{Host: "127.0.0.1:9900"},
			StateDir:  "/var/lib/fairlead",
		},
		Groups: []Group{{
			Name:     "edge",
			Listener: Listener{Address: addrPort("127.0.0.1:8080"), PeekDigits: 6, DrainTime: time.Hour, UploadTimeout: time.Minute},
			Routes:   []string{"chat"},
		}},
		Pools: []Pool{{
			Name: "vllm", Tier: "vllm", Protocol: HTTP1, MaxInFlight: 256, ConnectTimeout: 3 * time.Second,
			Endpoints: []Endpoint{{Name: "127.0.0.1:8000", Address: addrPort("127.0.0.1:8000"), Capacity: 1}},
			Telemetry: Telemetry{Source: TelemetryNone, Interval: 200 * time.Millisecond, EnginePath: "/metrics"},
			SpillAt:   0.7, Limit: LimitFixed,
		}},
		Routes: []Route{{
			Name: "chat", Match: Match{Prefix: "/v1"}, Dialect: DialectOpenAI,
			Strategy: StrategyDynamic, ClientStrategy: ClientStrategyHonor, Affinity: AffinitySession,
			DefaultMaxTokens: 512, Split: Split{{"vllm", 1}}, RetryBody: 8 << 20, MaxBody: 64 << 20,
			OnFailure: FailOpen, Class: ClassInteractive, FairShare: true, Generates: GeneratesPaths, Oversize: OversizeRefuse, NoRoom: OversizePass, Unread: OversizePass, RetryFields: RetryFieldsFixed,
		}},
		Digest: c.Digest,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
	full, err := Load("testdata/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := *full.Pools[1].HealthCheck, (HealthCheck{"/health", time.Second, 500 * time.Millisecond, 2, 1}); got != want {
		t.Errorf("healthCheck: {}: got %+v, want %+v", got, want)
	}
}

// TestFullFileUsesEveryKey holds full.yaml to its word.
func TestFullFileUsesEveryKey(t *testing.T) {
	d := &decoder{lines: map[string]int{}}
	data := mustRead(t, "testdata/full.yaml")
	object(configFields(new(Config))).read(d, d.document(data), "")
	used := map[string]bool{}
	for path := range d.lines {
		used[withoutIndexes(path)] = true
	}
	for _, key := range schemaKeys(t) {
		if !used[key] {
			t.Errorf("full.yaml has no %s", key)
		}
	}
}

func TestGoodFilesAreAccepted(t *testing.T) {
	for _, path := range goodFiles(t) {
		if _, err := Load(path); err != nil {
			t.Errorf("%s", err)
		}
	}
}

// goodFiles are the valid configurations of this repository.
func goodFiles(t *testing.T) []string {
	t.Helper()
	files := []string{"testdata/full.yaml"}
	for _, pattern := range []string{"testdata/good/*.yaml", "../examples/*/fairlead.yaml"} {
		more, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, more...)
	}
	return files
}

func TestExampleInTheREADMEIsAccepted(t *testing.T) {
	_, rest, _ := strings.Cut(string(mustRead(t, "../README.md")), "```yaml\n")
	example, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("README.md shows no config")
	}
	if _, err := Parse("README.md's example", []byte(example)); err != nil {
		t.Error(err)
	}
}

func TestAllFaultsOfAFileAreReportedAtOnce(t *testing.T) {
	files, err := filepath.Glob("testdata/faulty/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no files", err)
	}
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			_, err := Parse(filepath.Base(path), mustRead(t, path))
			var faults Faults
			if !errors.As(err, &faults) {
				t.Fatalf("got %v", err)
			}
			want := strings.TrimSuffix(path, ".yaml") + ".want"
			if *update {
				if err := os.WriteFile(want, []byte(faults.Error()+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := faults.Error() + "\n"; got != string(mustRead(t, want)) {
				t.Errorf("got:\n%s\nwant (%s, rewritten by -update):\n%s", got, want, mustRead(t, want))
			}
			for _, f := range faults {
				if f.Line == 0 || f.Found == "" || f.Accepted == "" {
					t.Errorf("incomplete: %+v", f)
				}
			}
		})
	}
}

func TestLoadNamesWhatItCannotRead(t *testing.T) {
	_, err := Load("testdata/absent.yaml")
	if err == nil || !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "testdata/absent.yaml") {
		t.Errorf("got %v", err)
	}
	if _, err := Load("testdata"); err == nil {
		t.Error("a directory was loaded")
	}
	big := filepath.Join(t.TempDir(), "big.yaml")
	if err := os.WriteFile(big, bytes.Repeat([]byte("# nothing\n"), maxFileSize/10+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(big); err == nil || err.Error() != big+": found more than 4 MiB; accepted: a file of at most 4 MiB" {
		t.Errorf("got %v", err)
	}
}

func TestAVeryFaultyFileHasABoundedList(t *testing.T) {
	data := "apiVersion: x\n" + strings.Repeat("? [k]\n: v\n", 2000)
	_, err := Parse("f", []byte(data))
	faults, _ := err.(Faults)
	if len(faults) != maxFaults+1 {
		t.Fatalf("%d faults", len(faults))
	}
	if last := faults[maxFaults].String(); last != "f: found more than these 500 faults; accepted: none" {
		t.Errorf("the last line is %q", last)
	}
}

func mustRead(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestTheAdmissionPageNamesEachGeneratingPath(t *testing.T) {
	_, rest, _ := strings.Cut(string(mustRead(t, "../docs/admission.md")), "## Which requests count\n")
	section, _, found := strings.Cut(rest, "\n## ")
	if !found {
		t.Fatal("docs/admission.md has no section on which requests count")
	}
	for _, end := range GeneratingPaths() {
		if !strings.Contains(section, "`"+end+"`") {
			t.Errorf("docs/admission.md does not name %s", end)
		}
	}
}
