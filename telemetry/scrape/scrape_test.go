package scrape

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const interval = 200 * time.Millisecond

func key(i int) fleet.EndpointKey {
	return fleet.EndpointKey{Pool: "p", Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 8000)}
}

func target(i int) Target {
	return Target{Endpoint: key(i), EngineURL: "http://" + key(i).Address.String() + "/metrics", Interval: interval}
}

// server is a fake transport: what each URL's host answers, and when it was
// asked.
type server struct {
	mu     sync.Mutex
	asked  map[string][]time.Time
	flying map[string]int
	answer func(req *http.Request) (*http.Response, error)
}

func newServer(answer func(*http.Request) (*http.Response, error)) *server {
	return &server{asked: map[string][]time.Time{}, flying: map[string]int{}, answer: answer}
}

func (s *server) RoundTrip(req *http.Request) (*http.Response, error) {
	url := req.URL.String()
	s.mu.Lock()
	s.asked[url] = append(s.asked[url], time.Now())
	s.flying[url]++
	if s.flying[url] > 1 {
		panic("two scrapes of one page at once")
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.flying[url]--
		s.mu.Unlock()
	}()
	return s.answer(req)
}

func (s *server) times(url string) []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]time.Time(nil), s.asked[url]...)
}

func ok(body string) (*http.Response, error) {
	return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body))}, nil
}

// hang answers only when the request is given up.
func hang(req *http.Request) (*http.Response, error) {
	<-req.Context().Done()
	return nil, req.Context().Err()
}

// collect runs the scraper and gathers readings. stop ends it and returns Run's
// error.
func collect(s *Scraper) (readings func() []telemetry.Reading, stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	var got []telemetry.Reading
	done := make(chan error, 1)
	go func() {
		done <- s.Run(ctx, func(r telemetry.Reading) {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, r)
		})
	}()
	readings = func() []telemetry.Reading {
		mu.Lock()
		defer mu.Unlock()
		return append([]telemetry.Reading(nil), got...)
	}
	return readings, func() error { cancel(); return <-done }
}

func TestPollsOnAFixedGridWithAPhasePerTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(func(*http.Request) (*http.Response, error) {
			time.Sleep(30 * time.Millisecond) // must not shift the grid
			return ok("vllm:num_requests_running 1\n")
		})
		begin := time.Now()
		s := New([]Target{target(1), target(2)}, Options{Client: &http.Client{Transport: srv}})
		readings, stop := collect(s)
		time.Sleep(10 * time.Second)
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		var phases []time.Duration
		for i := 1; i <= 2; i++ {
			times := srv.times(target(i).EngineURL)
			first := times[0].Sub(begin)
			if first != phase(target(i).EngineURL, interval) || first >= interval || len(times) != 50 {
				t.Fatalf("target %d: first after %v, %d scrapes in 10 s", i, first, len(times))
			}
			for k, at := range times {
				if at.Sub(times[0]) != time.Duration(k)*interval {
					t.Fatalf("target %d: scrape %d after %v", i, k, at.Sub(times[0]))
				}
			}
			phases = append(phases, first)
		}
		if phases[0] == phases[1] {
			t.Fatal("both targets in the same phase")
		}
		if n := len(readings()); n < 98 {
			t.Fatalf("%d readings", n)
		}
	})
}

// TestSlowTargetKeepsToTheGrid: an answer that takes longer than the interval
// costs the rounds it covers and nothing more.
func TestSlowTargetKeepsToTheGrid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(func(*http.Request) (*http.Response, error) {
			time.Sleep(350 * time.Millisecond)
			return ok("vllm:num_requests_running 1\n")
		})
		_, stop := collect(New([]Target{target(1)}, Options{Client: &http.Client{Transport: srv}}))
		time.Sleep(5 * time.Second)
		stop()
		times := srv.times(target(1).EngineURL)
		for k, at := range times {
			if at.Sub(times[0]) != time.Duration(2*k)*interval {
				t.Fatalf("scrape %d after %v, want every second round", k, at.Sub(times[0]))
			}
		}
	})
}

func TestHangingTargetIsGivenUpAndBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(func(req *http.Request) (*http.Response, error) {
			if req.URL.Host == key(1).Address.String() {
				return hang(req)
			}
			return ok("vllm:num_requests_running 1\n")
		})
		s := New([]Target{target(1), target(2)}, Options{Client: &http.Client{Transport: srv}})
		readings, stop := collect(s)
		time.Sleep(20 * time.Second)
		stop()
		times := srv.times(target(1).EngineURL)
		if len(times) < 15 || len(times) > 22 {
			t.Fatalf("%d scrapes of a hanging target in 20 s, want about one a second", len(times))
		}
		if last := times[len(times)-1].Sub(times[len(times)-2]); last != time.Second {
			t.Fatalf("back-off grew to %v, want 1 s", last)
		}
		healthy := 0
		for _, r := range readings() {
			switch {
			case r.Endpoint == key(2) && r.Err == nil:
				healthy++
			case r.Endpoint == key(1) && !errors.Is(r.Err, context.DeadlineExceeded):
				t.Fatalf("reading of the hanging target: %+v", r)
			}
		}
		if healthy < 98 {
			t.Fatalf("%d readings of the healthy target", healthy)
		}
		c := s.Counters()
		// One more may have been under way when Run ended.
		if d := c.Failures - uint64(len(times)); d > 1 || c.Scrapes < 100 {
			t.Fatalf("%+v with %d scrapes of the hanging target", c, len(times))
		}
	})
}

func TestRecoveredTargetReturnsToItsInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		srv := newServer(func(*http.Request) (*http.Response, error) {
			if time.Since(begin) < 5*time.Second {
				return nil, errors.New("refused")
			}
			return ok("vllm:num_requests_running 1\n")
		})
		s := New([]Target{target(1)}, Options{Client: &http.Client{Transport: srv}})
		_, stop := collect(s)
		time.Sleep(10 * time.Second)
		stop()
		times := srv.times(target(1).EngineURL)
		if gap := times[len(times)-1].Sub(times[len(times)-2]); gap != interval {
			t.Fatalf("interval after recovery %v", gap)
		}
	})
}

func TestSetTargetsKeepsWhatStaysAndSilencesWhatGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(func(*http.Request) (*http.Response, error) { return ok("vllm:num_requests_running 1\n") })
		s := New([]Target{target(1), target(2)}, Options{Client: &http.Client{Transport: srv}})
		readings, stop := collect(s)
		time.Sleep(2 * time.Second)
		s.SetTargets([]Target{target(2), target(3)})
		synctest.Wait()
		before := len(readings())
		time.Sleep(2 * time.Second)
		stop()
		seen := map[fleet.EndpointKey]int{}
		for _, r := range readings()[before:] {
			seen[r.Endpoint]++
		}
		if seen[key(1)] != 0 || seen[key(2)] < 9 || seen[key(3)] < 9 {
			t.Fatalf("readings after the change: %v", seen)
		}
		times := srv.times(target(2).EngineURL)
		for k, at := range times {
			if at.Sub(times[0]) != time.Duration(k)*interval {
				t.Fatal("the phase of a target that stayed was lost")
			}
		}
		// A removed target's page is not asked any more.
		if n := len(srv.times(target(1).EngineURL)); n > 11 {
			t.Fatalf("%d scrapes of a removed target", n)
		}
	})
}

func TestGPUNumbersRideAlongAndOutliveADeadEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		srv := newServer(func(req *http.Request) (*http.Response, error) {
			switch {
			case req.URL.Path == "/gpu":
				xid := 0
				if time.Since(begin) > 2*time.Second {
					xid = 79
				}
				return ok(fmt.Sprintf("DCGM_FI_DEV_XID_ERRORS %d\nDCGM_FI_DEV_GPU_UTIL 40\nDCGM_FI_DEV_ROW_REMAP_PENDING 1\n", xid))
			case time.Since(begin) > 2*time.Second:
				return nil, errors.New("refused")
			}
			return ok("vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")
		})
		tgt := target(1)
		tgt.GPUURL = "http://10.0.0.1:9400/gpu"
		readings, stop := collect(New([]Target{tgt}, Options{Client: &http.Client{Transport: srv}}))
		time.Sleep(4 * time.Second)
		stop()
		var w telemetry.Window
		failures := 0
		for _, r := range readings() {
			if r.Err != nil {
				failures++
				continue
			}
			w.Add(r.Sample)
		}
		last, _ := w.Latest()
		if failures == 0 || last.XID != 79 || last.GPUUtil != 0.4 || last.Condition != telemetry.ConditionDrain || last.Known.HasEngine() {
			t.Fatalf("%d failures, last sample %+v", failures, last)
		}
		if age := w.Age(begin.Add(4 * time.Second)); age < 1500*time.Millisecond {
			t.Fatalf("GPU numbers made a dead engine young: age %v", age)
		}
	})
}

// TestFrozenExporterIsNoGPU: dcgm-exporter serves its cache for ever; once its
// energy counters stand still for 2 s the GPU is unknown, the engine is not.
func TestFrozenExporterIsNoGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		srv := newServer(func(req *http.Request) (*http.Response, error) {
			if req.URL.Path == "/gpu" {
				energy := min(time.Since(begin), 2*time.Second).Milliseconds()
				return ok(fmt.Sprintf("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION %d\nDCGM_FI_DEV_POWER_USAGE 300\nDCGM_FI_DEV_GPU_UTIL 99\n", energy))
			}
			return ok(fmt.Sprintf("vllm:num_requests_running 1\nvllm:generation_tokens_total %d\n", time.Since(begin)))
		})
		tgt := target(1)
		tgt.GPUURL = "http://10.0.0.1:9400/gpu"
		s := New([]Target{tgt}, Options{Client: &http.Client{Transport: srv}})
		readings, stop := collect(s)
		time.Sleep(10 * time.Second)
		stop()
		known, unknown := 0, 0
		for _, r := range readings() {
			age := r.Sample.At.Sub(begin)
			switch gpu := r.Sample.Known.HasGPU(); {
			case gpu && age > 4*time.Second+2*interval:
				t.Fatalf("a frozen exporter's GPU is known after %v", age)
			case gpu:
				known++
			case age > 5*time.Second:
				unknown++
			}
			if !r.Sample.Known.HasEngine() {
				t.Fatalf("engine unknown: %+v", r)
			}
		}
		if known < 15 || unknown < 20 || s.Counters().Frozen < 20 {
			t.Fatalf("%d samples with, %d without a GPU, %+v", known, unknown, s.Counters())
		}
	})
}

// TestEmptyPageTellsNothing: dcgm-exporter answers 200 without a line while it
// reloads. Nothing is known then, and nothing is zero.
func TestEmptyPageTellsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		srv := newServer(func(req *http.Request) (*http.Response, error) {
			page := "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
			if req.URL.Path == "/gpu" {
				page = "DCGM_FI_DEV_GPU_UTIL 40\n"
			}
			if time.Since(begin) > 2*time.Second {
				page = ""
			}
			return ok(page)
		})
		tgt := target(1)
		tgt.GPUURL = "http://10.0.0.1:9400/gpu"
		readings, stop := collect(New([]Target{tgt}, Options{Client: &http.Client{Transport: srv}}))
		time.Sleep(4 * time.Second)
		stop()
		var w telemetry.Window
		said := false
		for _, r := range readings() {
			if r.Err != nil {
				if !errors.Is(r.Err, errNothingKnown) {
					t.Fatal(r.Err)
				}
				said = true
				continue
			}
			w.Add(r.Sample)
		}
		if !said {
			t.Error("no reading says that the page has nothing to say")
		}
		last, _ := w.Latest()
		if age := w.Age(time.Now()); last.Known.HasEngine() && last.At.Sub(begin) > 2*time.Second || age < 1500*time.Millisecond {
			t.Fatalf("known %b, age %v", last.Known, age)
		}
	})
}

func TestFrozenPageAges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(func(*http.Request) (*http.Response, error) {
			return ok("vllm:num_requests_running 3\nvllm:generation_tokens_total 77\n")
		})
		readings, stop := collect(New([]Target{target(1)}, Options{Client: &http.Client{Transport: srv}}))
		time.Sleep(5 * time.Second)
		stop()
		all := readings()
		first, last := all[0].Sample, all[len(all)-1].Sample
		if !last.Changed.Equal(first.At) || last.At.Sub(first.At) < 4*time.Second {
			t.Fatalf("changed %v after the first sample", last.Changed.Sub(first.At))
		}
	})
}

// TestStepCountersProveLife: TGI and Triton count no tokens; their batch may
// stand for long while each step adds to the counter of steps.
func TestStepCountersProveLife(t *testing.T) {
	for name, page := range map[string]string{
		"TGI":    "tgi_batch_current_size 3\ntgi_queue_size 0\ntgi_batch_inference_count{method=\"prefill\"} 3\ntgi_batch_inference_count{method=\"next_token\"} %d\n",
		"Triton": "nv_trt_llm_request_metrics{request_type=\"scheduled\"} 3\nnv_trt_llm_general_metrics{general_type=\"iteration_counter\"} %d\nnv_trt_llm_general_metrics{general_type=\"timestamp\"} 1700074049\n",
	} {
		for _, hung := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				step := 0
				srv := newServer(func(*http.Request) (*http.Response, error) {
					if !hung {
						step++
					}
					return ok(fmt.Sprintf(page, step))
				})
				readings, stop := collect(New([]Target{target(1)}, Options{Client: &http.Client{Transport: srv}}))
				time.Sleep(5 * time.Second)
				stop()
				var w telemetry.Window
				for _, r := range readings() {
					w.Add(r.Sample)
				}
				last, _ := w.Latest()
				young, moved := w.Age(last.At) == 0, w.Moved().Equal(last.At)
				if young == hung || moved == hung {
					t.Errorf("%s, hung %v: young %v, moved %v", name, hung, young, moved)
				}
			})
		}
	}
}

func TestSecondRunIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(nil, Options{})
		_, stop := collect(s)
		synctest.Wait()
		if err := s.Run(context.Background(), func(telemetry.Reading) {}); err == nil {
			t.Fatal("two runs at once")
		}
		stop()
		_, stop = collect(s)
		synctest.Wait()
		stop()
	})
}

// TestRealServers scrapes over real connections: a good server, one that
// answers 500, one whose page has no end, one that redirects, one that is not
// there, and an h2c one.
func TestRealServers(t *testing.T) {
	good := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Accept-Encoding") != "" {
			t.Errorf("asked for %q", r.Header.Get("Accept-Encoding"))
		}
		_, _ = w.Write(vllmPage())
	}))
	defer good.Close()
	failing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(500) }))
	defer failing.Close()
	endless := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		line := []byte(strings.Repeat("x", 1<<16))
		for r.Context().Err() == nil {
			if _, err := w.Write(line); err != nil {
				return
			}
		}
	}))
	defer endless.Close()
	redirecting := httptest.NewServer(http.RedirectHandler(good.URL, http.StatusFound))
	defer redirecting.Close()
	gone := httptest.NewServer(nil)
	gone.Close()
	h2c := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 2 {
			_, _ = w.Write([]byte("vllm:num_requests_running 2\n"))
		}
	}))
	h2c.Config.Protocols = new(http.Protocols)
	h2c.Config.Protocols.SetUnencryptedHTTP2(true)
	h2c.Start()
	defer h2c.Close()

	var targets []Target
	for i, url := range []string{good.URL, failing.URL, endless.URL, redirecting.URL, gone.URL, h2c.URL} {
		targets = append(targets, Target{Endpoint: key(i + 1), EngineURL: url, Interval: 500 * time.Millisecond, H2C: url == h2c.URL})
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	first := map[fleet.EndpointKey]telemetry.Reading{}
	err := New(targets, Options{MaxBody: 1 << 20}).Run(ctx, func(r telemetry.Reading) {
		// The first answer that is not just a loaded machine's timeout.
		if _, ok := first[r.Endpoint]; !ok && !errors.Is(r.Err, context.DeadlineExceeded) {
			first[r.Endpoint] = r
		}
		if len(first) == len(targets) {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("%v, with %d of %d targets heard", err, len(first), len(targets))
	}
	if s := first[key(1)].Sample; first[key(1)].Err != nil || s.Running != 0.5 || s.PromptTokens != 12345 {
		t.Errorf("good server: %+v", first[key(1)])
	}
	if s := first[key(6)].Sample; first[key(6)].Err != nil || s.Running != 2 {
		t.Errorf("h2c server: %+v", first[key(6)])
	}
	for i, want := range map[int]string{
		2: "status 500, want 200", 3: "page is larger than 1048576 bytes", 4: "status 302, want 200", 5: "connection refused",
	} {
		if err := first[key(i)].Err; err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), targets[i-1].EngineURL) {
			t.Errorf("target %d: %v, want %q", i, err, want)
		}
	}
}

func TestTargetsOfAConfig(t *testing.T) {
	address := netip.MustParseAddrPort("10.0.0.1:8000")
	endpoint := fleet.Endpoint{Address: address, GPUs: []string{"GPU-1"}}
	got := Targets([]fleet.Pool{
		{Name: "none", Endpoints: []fleet.Endpoint{endpoint}, Telemetry: fleet.Telemetry{Source: fleet.TelemetryNone}},
		{Name: "both", Protocol: fleet.H2C, Endpoints: []fleet.Endpoint{endpoint}, Telemetry: fleet.Telemetry{
			Source: fleet.TelemetryScrape, Interval: interval, EnginePath: "/metrics", GPUPath: "/gpu", GPUPort: 9400}},
	})
	want := Target{Endpoint: fleet.EndpointKey{Pool: "both", Address: address}, EngineURL: "http://10.0.0.1:8000/metrics",
		GPUURL: "http://10.0.0.1:9400/gpu", GPUs: []string{"GPU-1"}, H2C: true, Interval: interval}
	if len(got) != 1 || !got[0].equal(want) {
		t.Fatalf("got %+v", got)
	}
}
