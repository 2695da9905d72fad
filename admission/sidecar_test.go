package admission

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

func limits(m map[string]float64) func(string) float64 {
	return func(pool string) float64 { return m[pool] }
}

// holding is a group whose routes all ask for a hold.
func holding(name string, connected int, pools ...string) SidecarGroup {
	return SidecarGroup{Name: name, Connected: connected, Reaches: pools, Holds: pools}
}

func TestSidecarsShareAPoolsLimitEvenly(t *testing.T) {
	for _, c := range []struct {
		name   string
		limit  float64
		groups []SidecarGroup
		want   map[string]map[string]uint32
	}{
		{"one sidecar has it all", 5.9, []SidecarGroup{holding("edge", 1, "a")}, map[string]map[string]uint32{"edge": {"a": 5}}},
		{"the first to come has it all", 8, []SidecarGroup{holding("edge", 0, "a")}, map[string]map[string]uint32{"edge": {"a": 8}}},
		{"halves", 10, []SidecarGroup{holding("edge", 2, "a")}, map[string]map[string]uint32{"edge": {"a": 5}}},
		{"rounded down", 11, []SidecarGroup{holding("edge", 4, "a")}, map[string]map[string]uint32{"edge": {"a": 2}}},
		{"never nothing", 3, []SidecarGroup{holding("edge", 10, "a")}, map[string]map[string]uint32{"edge": {"a": 1}}},
		{"over groups", 40, []SidecarGroup{holding("edge", 3, "a"), holding("core", 1, "a", "b")}, map[string]map[string]uint32{"edge": {"a": 10}, "core": {"a": 10, "b": 40}}},
		{"who doesn't hold sends too", 40, []SidecarGroup{holding("edge", 3, "a"), {Name: "core", Connected: 1, Reaches: []string{"a"}}}, map[string]map[string]uint32{"edge": {"a": 10}, "core": {}}},
		{"who can't reach it doesn't count", 40, []SidecarGroup{holding("edge", 4, "a"), holding("core", 9, "b")}, map[string]map[string]uint32{"edge": {"a": 10}, "core": {"b": 4}}},
		{"no capacity is not held", 0, []SidecarGroup{holding("edge", 4, "a")}, map[string]map[string]uint32{"edge": {}}},
		{"a limit that is no number", math.NaN(), []SidecarGroup{holding("edge", 4, "a")}, map[string]map[string]uint32{"edge": {}}},
		{"no limit", math.Inf(1), []SidecarGroup{holding("edge", 4, "a")}, map[string]map[string]uint32{"edge": {}}},
		{"more than Envoy's number holds", 1e12, []SidecarGroup{holding("edge", 1, "a")}, map[string]map[string]uint32{"edge": {"a": math.MaxUint32}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := NewSidecars().Step(noon, limits(map[string]float64{"a": c.limit, "b": 40}), c.groups)
			if !maps.EqualFunc(got, c.want, func(a, b map[string]uint32) bool { return maps.Equal(a, b) }) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

func TestSidecarPartsShrinkAtOnceAndGrowByATenthOrWithTheSidecars(t *testing.T) {
	s := NewSidecars()
	now := noon
	at := func(after time.Duration, limit float64, connected int) uint32 {
		now = now.Add(after)
		return s.Step(now, limits(map[string]float64{"a": limit}), []SidecarGroup{holding("edge", connected, "a")})["edge"]["a"]
	}
	const moment, away = time.Second, SidecarGrace + time.Second
	for _, c := range []struct {
		after     time.Duration
		limit     float64
		connected int
		want      uint32
	}{
		{moment, 1000, 10, 100},
		{moment, 1099, 10, 100}, // 109: less than a tenth more
		{moment, 1100, 10, 110}, // a tenth
		{moment, 990, 10, 99},   // ten times 110 would be too many
		{moment, 910, 10, 91},
		{moment, 919, 10, 91},
		{moment, 1000, 10, 91}, // 100 is 9.9 % more
		{moment, 1010, 10, 101},
		{moment, 1000, 20, 50}, // another ten
		{moment, 1000, 21, 47}, // another: 21 times 50 would be too many
		{moment, 1000, 20, 47}, // one is away, and may come back
		{away, 1000, 20, 50},   // it doesn't: 6 % more, with the number of sidecars
		{moment, 0, 20, 0},
		{moment, 1099, 20, 54},
		{moment, 21, 20, 1},
		{moment, 15, 20, 1}, // never nothing
		{moment, 40, 20, 2},
	} {
		if got := at(c.after, c.limit, c.connected); got != c.want {
			t.Errorf("limit %v over %d sidecars: %d, want %d", c.limit, c.connected, got, c.want)
		}
	}
}

func TestSidecarKeepsItsPlaceWhileItRestarts(t *testing.T) {
	s := NewSidecars()
	at := func(after time.Duration, connected int) uint32 {
		return s.Step(noon.Add(after), limits(map[string]float64{"a": 60}), []SidecarGroup{holding("edge", connected, "a")})["edge"]["a"]
	}
	for _, c := range []struct {
		after     time.Duration
		connected int
		want      uint32
	}{
		{0, 3, 20},
		{1 * time.Second, 2, 20}, // one is away
		{20 * time.Second, 2, 20},
		{25 * time.Second, 3, 20},              // and back
		{26 * time.Second, 4, 15},              // one more counts at once
		{27 * time.Second, 1, 15},              // three leave
		{26*time.Second + SidecarGrace, 1, 15}, // to the end of their grace
		{27*time.Second + SidecarGrace, 1, 60},
		{28*time.Second + SidecarGrace, 0, 60},
		{200 * time.Second, 0, 60},
	} {
		if got := at(c.after, c.connected); got != c.want {
			t.Errorf("after %v with %d: %d, want %d", c.after, c.connected, got, c.want)
		}
	}
	// A group that is gone is forgotten with its places.
	if got := s.Step(noon.Add(201*time.Second), limits(nil), nil); len(got) != 0 || len(s.places) != 0 || len(s.parts) != 0 {
		t.Errorf("got %v, remembers %v %v", got, s.places, s.parts)
	}
}

func TestSidecarGroupsFollowTheConfig(t *testing.T) {
	cfg := &fleet.Config{
		Groups: []fleet.Group{{Name: "edge", Routes: []string{"chat", "batch"}}, {Name: "core", Routes: []string{"batch"}}},
		Routes: []fleet.Route{
			{Name: "chat", Split: fleet.Split{{Pool: "a", Weight: 1}, {Pool: "b"}}, Fallback: []string{"c"}, HoldAtSidecar: true},
			{Name: "batch", Split: fleet.Split{{Pool: "b", Weight: 1}}, Fallback: []string{"d"}},
			{Name: "unused", Split: fleet.Split{{Pool: "e", Weight: 1}}, HoldAtSidecar: true},
		},
	}
	got := SidecarGroups(cfg, func(group string) int { return len(group) })
	want := []SidecarGroup{
		{Name: "edge", Connected: 4, Reaches: []string{"a", "b", "c", "d"}, Holds: []string{"a", "b", "c"}},
		{Name: "core", Connected: 4, Reaches: []string{"b", "d"}},
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
}

// Whatever comes, the parts of a pool don't exceed its limit, but for the one
// request that each always has, nor are they a tenth or more below what they
// could be; and the places are those of a count over the whole history.
func TestSidecarPartsNeverExceedTheLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewSidecars()
		now := noon
		type seen struct {
			at time.Time
			n  int
		}
		history := map[string][]seen{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(1, 12000).Draw(t, "ms")) * time.Millisecond)
			limit := map[string]float64{"a": rapid.Float64Range(0, 300).Draw(t, "a"), "b": rapid.Float64Range(0, 3).Draw(t, "b")}
			groups := []SidecarGroup{
				holding("edge", rapid.IntRange(0, 20).Draw(t, "edge"), "a", "b"),
				holding("core", rapid.IntRange(0, 20).Draw(t, "core"), "b"),
				{Name: "free", Connected: rapid.IntRange(0, 20).Draw(t, "free"), Reaches: []string{"a"}},
			}
			got := s.Step(now, limits(limit), groups)
			places := map[string]int{}
			for _, g := range groups {
				history[g.Name] = append(history[g.Name], seen{now, g.Connected})
				for _, h := range history[g.Name] {
					if now.Sub(h.at) <= SidecarGrace {
						places[g.Name] = max(places[g.Name], h.n)
					}
				}
			}
			for pool, l := range limit {
				n := 0
				for _, g := range groups {
					if slices.Contains(g.Reaches, pool) {
						n += places[g.Name]
					}
				}
				part := got["edge"][pool]
				if (l > 0) != (part > 0) {
					t.Fatalf("pool %s with limit %v has parts of %d", pool, l, part)
				}
				if sum := float64(part) * float64(n); part > 1 && sum > l {
					t.Fatalf("%d sidecars with %d each to pool %s, whose limit is %v", n, part, pool, l)
				}
				if could := math.Floor(l / float64(max(1, n))); could-float64(part) >= sidecarChange*float64(part) && l > 0 {
					t.Fatalf("%d sidecars with %d each to pool %s could have %v", n, part, pool, could)
				}
				if pool == "b" && got["core"][pool] != part {
					t.Fatalf("pool b: edge has %d, core %d", part, got["core"][pool])
				}
			}
		}
	})
}
