package sim

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestLoadReadsServersPoolsAndFaults(t *testing.T) {
	cfg, err := Load(filepath.Join("testdata", "fleet.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	small := profile(t, "llama-3.1-8b-h100").Slowed(8)
	small.KVTokens, small.MaxSeqs, small.Chunk = 16000, 16, 512
	server := func(name, listen, model, gpu string, engine Profile, perEvent int) ServerConfig {
		return ServerConfig{Name: name, Listen: netip.MustParseAddrPort(listen), Model: model, GPU: gpu, Engine: engine, TokensPerEvent: perEvent}
	}
	want := &Config{
		Seed: 7,
		Servers: []ServerConfig{
			server("big", "127.0.0.1:18001", "llama-3.1-70b", "GPU-11111111-2222-3333-4444-555555555555", profile(t, "llama-3.1-70b-4xh100"), 1),
			server("h100-1", "127.0.0.1:18101", "chat", defaultGPU("h100-1"), small, 8),
			server("h100-2", "127.0.0.1:18102", "chat", defaultGPU("h100-2"), small, 8),
			server("a100-1", "127.0.0.1:18201", "llama-3.1-8b", defaultGPU("a100-1"), small, 8),
		},
		Faults: []ScheduledFault{
			{"h100-2", Fault{Kind: Slow, At: 10 * time.Second, For: 90 * time.Second, Factor: 8}},
			{"a100-1", Fault{Kind: Crash, At: 500 * time.Millisecond}},
		},
	}
	if !reflect.DeepEqual(cfg, want) {
		t.Errorf("got %+v\nwant %+v", cfg, want)
	}
	if _, err := New(cfg, nil); err != nil {
		t.Error(err)
	}
}

// TestAllFaultsOfAFileAreReportedAtOnce compares the list with testdata.
func TestAllFaultsOfAFileAreReportedAtOnce(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "faulty.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = Parse("fleet.yaml", data)
	var problems Problems
	if !errors.As(err, &problems) {
		t.Fatalf("got %v; want problems", err)
	}
	golden(t, "faulty", err.Error()+"\n")
}

func TestParseSaysWhatIsNoFleetAtAll(t *testing.T) {
	for text, want := range map[string]string{
		"":                   "f:1: the file is empty",
		"# nothing\n":        "f:1: the file is empty",
		"- a\n":              "f:1: found a list; accepted: a mapping",
		"a: [\n":             "not YAML",
		"a: 1\n---\nb: 2\n":  "more than one document",
		"\tx":                "not YAML",
		"kind: Fairlead\n":   `f:1: kind: found "Fairlead"; accepted: Fleet`,
		"apiVersion: [1]\n":  "f:1: apiVersion: found a list; accepted: fairlead/v1alpha1",
		"servers: nothing\n": `f:1: servers: found "nothing"; accepted: a list`,
		"apiVersion: fairlead/v1alpha1\nkind: Fleet\nservers: []\n":                                        "f:1: no server",
		"pools:\n- {name: p, count: 9, listen: '127.0.0.1:65530', engine: {profile: llama-3.1-8b-h100}}\n": "f:2: pools[0].listen: found port 65530 for 9 servers",
	} {
		_, err := Parse("f", []byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v; want %q in it", text, err, want)
		}
	}
}

func TestNewRefusesWhatCodeBuiltWrong(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"found 0 servers":               func(c *Config) { c.Servers = nil },
		"a name is unique":              func(c *Config) { c.Servers = append(c.Servers, c.Servers[0]) },
		"no address":                    func(c *Config) { c.Servers[0].Listen = netip.AddrPort{} },
		"KV tokens; accepted":           func(c *Config) { c.Servers[0].Engine.KVTokens = 0 },
		"a batch of 0":                  func(c *Config) { c.Servers[0].Engine.MaxSeqs = 0 },
		"a chunk of 0":                  func(c *Config) { c.Servers[0].Engine.Chunk = 0 },
		"step costs":                    func(c *Config) { c.Servers[0].Engine.BaseNS = 0 },
		"-1 tokens per event":           func(c *Config) { c.Servers[0].TokensPerEvent = -1 },
		`no server is named "x"`:        func(c *Config) { c.Faults = []ScheduledFault{{"x", NewFault(Slow, 0, 0)}} },
		"found factor 0 for slow":       func(c *Config) { c.Faults = []ScheduledFault{{"h100-1", Fault{Kind: Slow}}} },
		"found fault kind 0":            func(c *Config) { c.Faults = []ScheduledFault{{"h100-1", Fault{}}} },
		"start and length must not be ": func(c *Config) { c.Faults = []ScheduledFault{{"h100-1", NewFault(Crash, -1, 0)}} },
	} {
		cfg := &Config{Servers: []ServerConfig{testConfig(t)}}
		change(cfg)
		if _, err := New(cfg, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v; want %q in it", err, want)
		}
	}
}

func TestParseFaultReadsTheShortForm(t *testing.T) {
	for text, want := range map[string]struct {
		server string
		fault  Fault
	}{
		"slow:h100-2@10s":              {"h100-2", Fault{Slow, 10 * time.Second, 0, 4}},
		"slow(8):h100-2@10s+30s":       {"h100-2", Fault{Slow, 10 * time.Second, 30 * time.Second, 8}},
		"crash:a100-1@5s":              {"a100-1", Fault{Crash, 5 * time.Second, 0, 0}},
		"crash:a100-1":                 {"a100-1", Fault{Crash, 0, 0, 0}},
		"oom:a+250ms":                  {"a", Fault{OutOfMemory, 0, 250 * time.Millisecond, 0}},
		"xid(48):a@0s":                 {"a", Fault{XID, 0, 0, 48}},
		"xid:a":                        {"a", Fault{XID, 0, 0, 79}},
		"frozen:a":                     {"a", Fault{Frozen, 0, 0, 0}},
		"blank:a":                      {"a", Fault{Blank, 0, 0, 0}},
		"throttle(2):a":                {"a", Fault{Throttle, 0, 0, 2}},
		"429:a":                        {"a", Fault{Throttle, 0, 0, 0}},
		"errorevent(3):a@1m+1h":        {"a", Fault{ErrorEvent, time.Minute, time.Hour, 3}},
		"silence:a@100ms+2500000000ns": {"a", Fault{Silence, 100 * time.Millisecond, 2500 * time.Millisecond, 0}},
	} {
		server, fault, err := ParseFault(text)
		if err != nil || server != want.server || fault != want.fault {
			t.Errorf("%s: got %s %+v, %v; want %+v", text, server, fault, err, want)
		}
		kind, rest, _ := strings.Cut(fault.String(), "@")
		if _, again, err := ParseFault(kind + ":" + server + "@" + rest); err != nil || again != fault {
			t.Errorf("%s: its own form %q reads as %+v, %v", text, fault, again, err)
		}
	}
}

func TestParseFaultSaysWhatIsAccepted(t *testing.T) {
	for text, want := range map[string]string{
		"":                  "names no server",
		"slow":              "names no server",
		"slow:":             "names no server",
		"slow:@1s":          "names no server",
		"melt:a":            `found fault "melt"; accepted: slow, oom, xid, frozen, blank, crash, throttle, errorevent, silence`,
		"slow:a@10":         `start: found "10"; accepted: a duration with unit`,
		"slow:a@-1s":        "start: found",
		"slow:a+0":          "length: found",
		"slow(0):a":         "accepted: a number from 0.01 to 10000",
		"slow(NaN):a":       "accepted: a number from",
		"slow(x):a":         `found "(x)"; accepted: a number in parentheses`,
		"slow(2:a":          `found "(2"`,
		"crash(2):a":        "crash takes none",
		"xid(1.5):a":        "accepted: a whole number from 1 to 999",
		"errorevent(0.5):a": "a whole number",
	} {
		_, _, err := ParseFault(text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v; want %q in it", text, err, want)
		}
	}
}

// FuzzParse: any bytes give a valid config or problems with lines, never both.
func FuzzParse(f *testing.F) {
	for _, name := range []string{"fleet.yaml", "faulty.yaml"} {
		data, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("servers: &a\n- *a\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, err := Parse("f", data)
		var problems Problems
		switch {
		case err == nil:
			if _, err := New(cfg, nil); err != nil {
				t.Fatalf("a file without faults is refused: %v", err)
			}
		case !errors.As(err, &problems) || len(problems) == 0 || cfg != nil:
			t.Fatalf("got %v, %v", cfg, err)
		}
	})
}

func FuzzParseFault(f *testing.F) {
	f.Add("slow(8):h100-2@10s+30s")
	f.Add("429:a")
	f.Fuzz(func(t *testing.T, text string) {
		server, fault, err := ParseFault(text)
		if err == nil && (server == "" || fault.check() != nil) {
			t.Fatalf("%q reads as %q %v", text, server, fault)
		}
	})
}
