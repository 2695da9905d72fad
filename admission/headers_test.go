package admission

import (
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite golden files")

func TestHeadersOfStandings(t *testing.T) {
	minute := Quota{Limit: 600, Remaining: 598, Window: time.Minute, Reset: 40*time.Second + time.Millisecond}
	day := Quota{Limit: 400_000, Remaining: 123_456, Window: 24 * time.Hour, Reset: 3 * time.Hour}
	var got strings.Builder
	for _, row := range []struct {
		name string
		s    Standing
	}{
		{"no limit", Standing{Policy: "free"}},
		{"requests alone", Standing{Requests: minute}},
		{"tokens alone", Standing{Tokens: day}},
		{"both", Standing{Requests: minute, Tokens: day}},
		{"a replica's own part", Standing{Requests: minute, Tokens: day, Local: true}},
		{"tokens overdrawn by usage, at the window's very end", Standing{
			Requests: Quota{Limit: 1, Window: time.Second},
			Tokens:   Quota{Limit: 1000, Remaining: -250, Window: time.Second, Reset: time.Nanosecond},
		}},
		{"as large as it gets", Standing{
			Requests: Quota{Limit: math.MaxInt64, Remaining: math.MaxInt64, Window: math.MaxInt64, Reset: math.MaxInt64},
			Tokens:   Quota{Limit: math.MaxInt64, Remaining: math.MaxInt64, Window: math.MaxInt64, Reset: math.MaxInt64},
			Local:    true,
		}},
	} {
		fmt.Fprintf(&got, "# %s\n", row.name)
		size := len(row.s.EachHeader(nil, func(name string, value []byte) {
			fmt.Fprintf(&got, "%s: %s\n", name, value)
		}))
		if size > 300 {
			t.Errorf("%s: takes %d bytes, documented: 300", row.name, size)
		}
	}
	const golden = "testdata/headers.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got.String(), want)
	}
}

func TestHeaderValuesDoNotShareBytes(t *testing.T) {
	s := Standing{Requests: Quota{Limit: 600, Remaining: 598, Window: time.Minute, Reset: time.Second}}
	kept := map[string][]byte{}
	s.EachHeader(make([]byte, 0, 300), func(name string, value []byte) {
		kept[name] = append(value, "!"...) // must not write into the next value
	})
	for name, want := range map[string]string{
		"x-ratelimit-limit": "600!", "x-ratelimit-remaining": "598!", "x-ratelimit-reset": "1!",
		"ratelimit-policy": `"requests";q=600;w=60!`, "ratelimit": `"requests";r=598;t=1!`,
	} {
		if string(kept[name]) != want {
			t.Errorf("%s: got %q, want %q", name, kept[name], want)
		}
	}
}

func TestHeadersAllocateNothing(t *testing.T) {
	s := Standing{
		Requests: Quota{Limit: 600, Remaining: 598, Window: time.Minute, Reset: time.Second},
		Tokens:   Quota{Limit: 400_000, Remaining: 398_000, Window: time.Minute, Reset: time.Second},
	}
	buf := make([]byte, 0, 300)
	total := 0
	count := func(_ string, value []byte) { total += len(value) }
	if n := testing.AllocsPerRun(100, func() { s.EachHeader(buf, count) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if total == 0 {
		t.Error("nothing was called")
	}
}

func BenchmarkHeaders(b *testing.B) {
	s := Standing{
		Requests: Quota{Limit: 600, Remaining: 598, Window: time.Minute, Reset: time.Second},
		Tokens:   Quota{Limit: 400_000, Remaining: 398_000, Window: time.Minute, Reset: time.Second},
	}
	buf := make([]byte, 0, 300)
	b.ReportAllocs()
	for b.Loop() {
		s.EachHeader(buf, func(string, []byte) {})
	}
}
