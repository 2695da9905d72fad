package extproc

import (
	"slices"
	"sync"
	"testing"
	"time"
)

func TestIDsIncreaseThoughTheClockStandsOrStepsBack(t *testing.T) {
	now := epoch
	ids, err := NewIDs(7, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for i := range 25_000 {
		if i == 12_000 {
			now = now.Add(-time.Hour)
		}
		all = append(all, ids.Next().String())
	}
	if all[0] != firstID {
		t.Errorf("first id %s", all[0])
	}
	if !slices.IsSorted(all) || len(slices.Compact(all)) != 25_000 {
		t.Error("ids don't strictly increase")
	}
	if got := all[10_000]; got != "1718924567124-007-0001" {
		t.Errorf("the 10,001st id of a millisecond is %s", got)
	}
}

func TestIDsAreUniqueAcrossGoroutines(t *testing.T) {
	ids, _ := NewIDs(0, time.Now)
	var mu sync.Mutex
	seen := map[ID]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			last := ID{}
			for range 2000 {
				id := ids.Next()
				if id.n <= last.n {
					t.Error("an id is not above the one before")
				}
				last = id
				mu.Lock()
				seen[id] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(seen) != 16_000 {
		t.Errorf("%d different ids of 16,000", len(seen))
	}
}

func TestParseIDReadsWhatAppendWrites(t *testing.T) {
	ids, _ := NewIDs(MaxShard, time.Now)
	id := ids.Next()
	got, err := ParseID(id.String())
	if err != nil || got != id || got.Seed() != id.Seed() {
		t.Errorf("%v, %v; want %v", got, err, id)
	}
	for _, bad := range []string{"", "1-2-3", "x718924567123-007-0001", "1718924567123-07-00001", "1718924567123-007-000x",
		"99999999999999999-007-0001", "-007-0001"} {
		if _, err := ParseID(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
	if _, err := NewIDs(1000, time.Now); err == nil {
		t.Error("shard 1000 was accepted")
	}
}
