package rollout

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet"
)

var now = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

// config is one route "messages" with the given split.
func config(split fleet.Split) *fleet.Config {
	return &fleet.Config{Routes: []fleet.Route{{Name: "messages", Split: split}}}
}

func split(pairs ...any) fleet.Split {
	var s fleet.Split
	for i := 0; i < len(pairs); i += 2 {
		s = append(s, fleet.SplitWeight{Pool: pairs[i].(string), Weight: uint32(pairs[i+1].(int))})
	}
	return s
}

func mustSet(t *testing.T, s State, cfg *fleet.Config, weights map[string]uint32) State {
	t.Helper()
	next, err := s.Set(cfg, "messages", weights, now)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func TestSetKeepsUnnamedWeightsAndOrder(t *testing.T) {
	cfg := config(split("h100", 10, "a100", 90))
	s := mustSet(t, State{}, cfg, map[string]uint32{"h100": 30})
	s = mustSet(t, s, cfg, map[string]uint32{"a100": 70})
	splits, _, drift := s.Apply(cfg)
	want := split("h100", 30, "a100", 70)
	if !reflect.DeepEqual(splits["messages"], want) {
		t.Fatalf("effective split %v, want %v", splits["messages"], want)
	}
	if len(drift) != 1 || !reflect.DeepEqual(drift[0], Drift{Route: "messages", File: cfg.Routes[0].Split, Effective: want, Since: now}) {
		t.Fatalf("drift %+v", drift)
	}
}

func TestSetRefusesWhatCannotBe(t *testing.T) {
	cfg := config(split("h100", 10, "a100", 90))
	for _, c := range []struct {
		name, route string
		weights     map[string]uint32
		want        []string
	}{
		{"unknown route", "chat", map[string]uint32{"h100": 1}, []string{`"chat"`, "accepted: messages"}},
		{"unknown pool", "messages", map[string]uint32{"b200": 1, "h100": 1}, []string{"b200", "accepted: h100, a100"}},
		{"no pool", "messages", nil, []string{"no pool is named"}},
		{"less than a basis point", "messages", map[string]uint32{"h100": 1, "a100": 1_000_000},
			[]string{`pool "h100": found 1, too little of the split for one basis point; accepted: 0, or a larger share`}},
		{"less than a basis point by another's weight", "messages", map[string]uint32{"a100": 4_000_000_000}, []string{`pool "h100": found 5,`}},
		{"all zero", "messages", map[string]uint32{"h100": 0, "a100": 0}, []string{"all weights would be 0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := mustSet(t, State{}, cfg, map[string]uint32{"h100": 5})
			after, err := before.Set(cfg, c.route, c.weights, now)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q lacks %q", err, w)
				}
			}
			if !bytes.Equal(after.Encode(), before.Encode()) {
				t.Error("the state changed")
			}
		})
	}
}

// TestSetAcceptsWhatTheFileAccepts compares the two judges of small weights.
func TestSetAcceptsWhatTheFileAccepts(t *testing.T) {
	cfg := config(split("h100", 1, "a100", 1))
	for _, b := range []uint32{1, 9_998, 9_999, 10_000, 19_998, 19_999, 20_000, 1_000_000} {
		_, err := State{}.Set(cfg, "messages", map[string]uint32{"h100": 1, "a100": b}, now)
		text := fmt.Sprintf(`{apiVersion: fairlead/v1alpha1, kind: Fairlead,
groups: [{ name: g, listener: { address: "127.0.0.1:1" }, routes: [messages] }],
pools: [{ name: h100, endpoints: [] }, { name: a100, endpoints: [] }],
routes: [{ name: messages, match: { prefix: / }, dialect: openai, split: [{ pool: h100, weight: 1 }, { pool: a100, weight: %d }] }]}`, b)
		_, fileErr := fleet.Parse("f", []byte(text))
		if (err == nil) != (fileErr == nil) {
			t.Errorf("1 and %d: by hand %v, in the file %v", b, err, fileErr)
		}
		if b == 1_000_000 && (err == nil || !strings.Contains(fileErr.Error(), "found 1, too little of the split for one basis point; accepted: 0, or a larger share")) {
			t.Errorf("by hand %v, in the file %v", err, fileErr)
		}
	}
}

func TestSetZeroForOneNamedPoolCountsTheOthers(t *testing.T) {
	cfg := config(split("h100", 0, "a100", 90))
	if _, err := (State{}).Set(cfg, "messages", map[string]uint32{"a100": 0}, now); err == nil {
		t.Fatal("a split of zeros was accepted")
	}
}

func TestEntryEndsWithTheFilesSplitOrTheRoute(t *testing.T) {
	cfg := config(split("h100", 10, "a100", 90))
	s := mustSet(t, State{}, cfg, map[string]uint32{"h100": 50})
	for _, c := range []struct {
		name string
		cfg  *fleet.Config
		ends bool
	}{
		{"same split", config(split("h100", 10, "a100", 90)), false},
		{"other weight", config(split("h100", 20, "a100", 90)), true},
		{"other order", config(split("a100", 90, "h100", 10)), true},
		{"other pool", config(split("h100", 10, "b200", 90)), true},
		{"route gone", &fleet.Config{}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			splits, next, drift := s.Apply(c.cfg)
			if _, kept := splits["messages"]; kept == c.ends {
				t.Errorf("kept = %t", kept)
			}
			if _, kept := next.Entry("messages"); kept == c.ends {
				t.Errorf("entry kept = %t", kept)
			}
			if (len(drift) == 0) != c.ends {
				t.Errorf("drift %v", drift)
			}
		})
	}
	if _, still := s.Entry("messages"); !still {
		t.Error("Apply changed its receiver")
	}
}

func TestClearReturnsToTheFile(t *testing.T) {
	cfg := config(split("h100", 10, "a100", 90))
	s := mustSet(t, State{}, cfg, map[string]uint32{"h100": 50}).SetBy("messages", "alice")
	if e, _ := s.Entry("messages"); e.By != "alice" {
		t.Fatalf("by %q", e.By)
	}
	splits, _, drift := s.Clear("messages").Apply(cfg)
	if len(splits) != 0 || len(drift) != 0 {
		t.Fatalf("splits %v drift %v", splits, drift)
	}
}

func TestEncodingRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := &fleet.Config{}
		s := State{}
		for _, name := range rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z]{1,8}`), 1, 5, rapid.ID[string]).Draw(t, "routes") {
			weights := rapid.SliceOfN(rapid.Uint32(), 2, 2).Draw(t, "weights")
			cfg.Routes = append(cfg.Routes, fleet.Route{Name: name, Split: split("p", 1, "q", 2)})
			next, err := s.Set(cfg, name, map[string]uint32{"p": weights[0], "q": weights[1]}, now)
			points := split("p", int(weights[0]), "q", int(weights[1])).BasisPoints()
			if ok := points != nil && (points[0] > 0 || weights[0] == 0) && (points[1] > 0 || weights[1] == 0); ok != (err == nil) {
				t.Fatalf("weights %v: %v", weights, err)
			}
			s = next
		}
		back, err := Decode(s.Encode())
		if err != nil {
			t.Fatal(err)
		}
		a, _, _ := s.Apply(cfg)
		b, _, _ := back.Apply(cfg)
		if !reflect.DeepEqual(a, b) || !bytes.Equal(s.Encode(), back.Encode()) {
			t.Fatalf("%v became %v", a, b)
		}
	})
}

func TestStoreSurvivesAndNamesACorruptFile(t *testing.T) {
	store := NewStore(t.TempDir())
	empty, err := store.Load()
	if err != nil || len(empty.entries) != 0 {
		t.Fatalf("no file: %v, %v", empty, err)
	}
	cfg := config(split("h100", 10, "a100", 90))
	s := mustSet(t, State{}, cfg, map[string]uint32{"h100": 50})
	for range 2 { // the second replaces the first
		if err := store.Save(s); err != nil {
			t.Fatal(err)
		}
	}
	back, err := store.Load()
	if err != nil || !bytes.Equal(back.Encode(), s.Encode()) {
		t.Fatalf("loaded %s, %v", back.Encode(), err)
	}
	info, err := os.Stat(store.Path())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	if files, _ := os.ReadDir(filepath.Dir(store.Path())); len(files) != 1 {
		t.Fatalf("left over: %v", files)
	}

	for _, bad := range []string{"", "{", `{"version":2,"routes":{}}`, `{"version":1,"routes":{},"x":1}`,
		`{"version":1,"routes":{"m":{"weights":[{"pool":"p","weight":0}],"fileDigest":"x","since":"2026-01-01T00:00:00Z"}}}`,
		string(s.Encode()) + "{}"} {
		if err := os.WriteFile(store.Path(), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := store.Load(); err == nil || !strings.Contains(err.Error(), store.Path()) {
			t.Errorf("%q: error %v doesn't name the file", bad, err)
		}
	}
}

func TestSaveReportsAMissingFolder(t *testing.T) {
	store := NewStore(filepath.Join(t.TempDir(), "missing"))
	if err := store.Save(State{}); err == nil || !strings.Contains(err.Error(), store.Path()) {
		t.Fatalf("error %v doesn't name the file", err)
	}
}

// FuzzDecode: what is accepted encodes to something that is accepted and equal.
func FuzzDecode(f *testing.F) {
	s, err := State{}.Set(config(split("h100", 10, "a100", 90)), "messages", map[string]uint32{"h100": 50}, now)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(s.Encode())
	f.Add(State{}.Encode())
	f.Add([]byte(`{"version":1,"routes":{"m":{}}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		s, err := Decode(raw)
		if err != nil {
			return
		}
		back, err := Decode(s.Encode())
		if err != nil || !bytes.Equal(back.Encode(), s.Encode()) {
			t.Fatalf("%q: %v", raw, err)
		}
	})
}
