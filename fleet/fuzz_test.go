package fleet

import (
	"path/filepath"
	"reflect"
	"testing"
)

// FuzzParse: any bytes give faults or a valid configuration, never a panic;
// the same bytes give the same; whatever is valid for the decoder fits the
// invariants that the rest of the program relies on.
func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/*.yaml", "testdata/good/*.yaml", "testdata/faulty/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, path := range files {
			f.Add(mustRead(f, path))
		}
	}
	for _, text := range []string{"", "a: [", "a: &a [*a]", "? {}", "--- \n---\n", "\xef\xbb\xbfkind: x", "a: !!binary x", "kind: |\n  x\n"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("f", data)
		again, errAgain := Parse("f", data)
		if !reflect.DeepEqual(c, again) || !reflect.DeepEqual(err, errAgain) {
			t.Fatalf("not the same twice: %v %v, %v %v", c, err, again, errAgain)
		}
		if err != nil {
			checkFaults(t, err)
			return
		}
		checkValid(t, c)
	})
}

func checkFaults(t *testing.T, err error) {
	faults, ok := err.(Faults)
	if !ok || len(faults) == 0 {
		t.Fatalf("the error is %T: %v", err, err)
	}
	for i, fault := range faults[:min(len(faults), maxFaults)] {
		if fault.Found == "" || fault.Accepted == "" || fault.Line < 0 || i > 0 && fault.Line < faults[i-1].Line {
			t.Fatalf("fault %d: %+v", i, fault)
		}
		for _, r := range fault.String() {
			if r < ' ' || r == 0x7f {
				t.Fatalf("a control character in %q", fault.String())
			}
		}
	}
}

func checkValid(t *testing.T, c *Config) {
	for _, p := range c.Pools {
		if p.Name == "" || p.Tier == "" || p.Protocol == 0 || p.MaxInFlight < 1 || p.ConnectTimeout <= 0 || p.Telemetry.Source == 0 {
			t.Fatalf("pool %+v", p)
		}
		for _, e := range p.Endpoints {
			if !e.Address.IsValid() || e.Name == "" || e.Capacity <= 0 {
				t.Fatalf("endpoint %+v", e)
			}
		}
	}
	for _, r := range c.Routes {
		if r.Name == "" || r.Match.Prefix == "" || r.Dialect == 0 || r.Strategy == 0 || r.ClientStrategy == 0 || r.Split.BasisPoints() == nil || r.DefaultMaxTokens < 1 || r.MaxBody < 1 {
			t.Fatalf("route %+v", r)
		}
		for _, w := range r.Split {
			if _, ok := c.PoolByName(w.Pool); !ok {
				t.Fatalf("route %+v names no pool", r)
			}
		}
	}
	for _, g := range c.Groups {
		for _, name := range g.Routes {
			if _, ok := c.RouteByName(name); !ok {
				t.Fatalf("group %+v names no route", g)
			}
		}
	}
}
