package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRequestsAreWhatTheRoutesExpect(t *testing.T) {
	for _, p := range pieces {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(p.request("127.0.0.1:1"))))
		if err != nil {
			t.Fatalf("%s: %v", p.name, err)
		}
		body, err := io.ReadAll(r.Body)
		var asked struct {
			MaxTokens int `json:"max_tokens"`
		}
		if err != nil || len(body) != p.body || json.Unmarshal(body, &asked) != nil || asked.MaxTokens != 64 {
			t.Errorf("%s: %d bytes of body, %v: %.80s…", p.name, len(body), err, body)
		}
		if declared := r.Header.Get(wire.HeaderMaxTokens); (declared != "") != (p.path == pathHeaders) {
			t.Errorf("%s on %s: header max_tokens %q", p.name, p.path, declared)
		}
		if !fleet.Generates(p.path) {
			t.Errorf("%s does not generate", p.path)
		}
	}
}

func TestEachSetupHasTheFiltersItNames(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:1")
	cfg, err := fleet.Parse("bench.yaml", []byte(configText("/run/bench", netip.MustParseAddrPort("127.0.0.1:2"), []netip.AddrPort{at})))
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []without{{}, {extProc: true}, {logs: true}, {extProc: true, logs: true}} {
		l, err := envoy.BuildListener(cfg, cfg.Groups[0], at, envoy.Runtime{ExtProc: cfg.Serve.ExtProc, AccessLog: cfg.Serve.AccessLog})
		if err != nil {
			t.Fatal(err)
		}
		if l, err = w.strip(l); err != nil {
			t.Fatal(err)
		}
		m := &hcmv3.HttpConnectionManager{}
		if err := l.FilterChains[0].Filters[0].GetTypedConfig().UnmarshalTo(m); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{wire.AttributesKey, filterPeek} {
			if there := slices.ContainsFunc(m.HttpFilters, func(f *hcmv3.HttpFilter) bool { return f.Name == name }); there == w.extProc {
				t.Errorf("%+v: filter %s is there: %t", w, name, there)
			}
		}
		text := l.String()
		if logs := strings.Contains(text, wire.LogUpstream) || len(m.AccessLog) > 0; logs == w.logs {
			t.Errorf("%+v: logs: %t", w, logs)
		}
		if err := envoy.Validate(l); err != nil {
			t.Errorf("%+v: %v", w, err)
		}
	}
}

func TestLoadCountsEveryAnswer(t *testing.T) {
	u, err := startUpstreams(1)
	if err != nil {
		t.Fatal(err)
	}
	defer u.close()
	at := u.addresses[0].String()
	l := newLoad(at, pieces[0].request(at))
	defer l.close()
	for range 2 {
		r, err := l.run(500, 100*time.Millisecond)
		if err != nil || r.sent != 50 || r.failed != 0 || len(l.took) != 50 || r.p50 <= 0 || r.p99 < r.p50 {
			t.Errorf("%+v with %d latencies, %v", r, len(l.took), err)
		}
	}
}

func TestLoadTellsFailures(t *testing.T) {
	u, err := startUpstreams(1)
	if err != nil {
		t.Fatal(err)
	}
	at := u.addresses[0].String()
	l := newLoad(at, pieces[0].request(at))
	defer l.close()
	if _, err := l.run(100, 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	u.close()
	if r, err := l.run(100, 50*time.Millisecond); err == nil && r.failed == 0 {
		t.Errorf("no failure although the server is gone: %+v", r)
	}
}

func TestMessagesAreReadToTheirEnd(t *testing.T) {
	const two = "HTTP/1.1 429 Too Many\r\nContent-Length: 3\r\n\r\nabc" + "POST / HTTP/1.1\r\nx: y\r\ncontent-length:0\r\n\r\n"
	r := bufio.NewReader(strings.NewReader(two))
	if status, err := readMessage(r); status != 429 || err != nil {
		t.Errorf("status %d, %v", status, err)
	}
	if status, err := readMessage(r); status != 0 || err != nil {
		t.Errorf("a request: status %d, %v", status, err)
	}
	for _, bad := range []string{"", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc"} {
		if _, err := readMessage(bufio.NewReader(strings.NewReader(bad))); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func TestABarIsMissedOnlyByTheWholeInterval(t *testing.T) {
	b := bar{most: 1.1}
	for _, c := range []struct {
		low, high float64
		want      string
	}{{0.9, 1.1, "held"}, {0.9, 1.2, "not missed (the interval reaches above)"}, {1.11, 1.2, "missed"}} {
		if got := b.verdict(interval{median: 1, low: c.low, high: c.high}); got != c.want {
			t.Errorf("%v … %v: %q, want %q", c.low, c.high, got, c.want)
		}
	}
	if got := (bar{}).verdict(interval{low: 5}); got != "" {
		t.Errorf("no bar: %q", got)
	}
}

func TestRatiosAreTakenWithinARound(t *testing.T) {
	tr := through{samples: map[cell][]sample{
		{"plain", 1}: {{p50: 100}, {p50: 200}, {p50: 300}},
		{"a", 1}:     {{p50: 130}, {p50: 240}, {p50: 310}},
		{"b", 1}:     {{p50: 120}, {p50: 220}, {p50: 305}},
	}}
	if got := tr.ratio("a", "b", "plain", 1, p50Of); got.low != 1.5 || got.median != 2 || got.high != 2 {
		t.Errorf("%+v", got)
	}
}
