package accesslog

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestEveryIDOfExtprocIsADecision: whatever the clock and the replica.
func TestEveryIDOfExtprocIsADecision(t *testing.T) {
	for _, at := range []time.Time{
		time.UnixMilli(100_000_000_000), // 1973
		time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC),
		time.UnixMilli(999_999_999_999), time.UnixMilli(1_000_000_000_000), // 2001
		epoch, time.Now(),
		time.UnixMilli(9_999_999_999_999), time.UnixMilli(10_000_000_000_000), // 2286
		time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
	} {
		for _, shard := range []int{0, 7, 42, extproc.MaxShard} {
			ids, err := extproc.NewIDs(shard, func() time.Time { return at })
			if err != nil {
				t.Fatal(err)
			}
			for range 20_001 { // past the end of a millisecond
				id := ids.Next().String()
				if _, err := extproc.ParseID(id); err != nil || !Decided(id) {
					t.Fatalf("%s: %q, shard %d, is no decision (%v)", at.UTC(), id, shard, err)
				}
			}
		}
	}
}

func TestOtherIDsAreNoDecisions(t *testing.T) {
	for _, other := range []string{
		"", "-", "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55", "202-555-0147", "1-007-0001", "17189245671-007-0001", "1718924567123456-007-0001",
		"1718924567123-007-001", "1718924567123-07-00001", "1718924567123-007-000x", "1718924567123-x07-0001", "x718924567123-007-0001",
		"1718924567123_007-0001", "1718924567123-007_0001", "-718924567123-007-0001", "1718924567123-007-0001 ", "171892456712３-007-0001",
	} {
		if Decided(other) {
			t.Errorf("%q is taken for a decision", other)
		}
	}
}

// TestShortIDsMeetTheirReservation: with a clock before 2001 ids are shorter, and
// the log must find what was reserved under them.
func TestShortIDsMeetTheirReservation(t *testing.T) {
	s := newScript(t)
	ids, err := extproc.NewIDs(7, func() time.Time { return time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) })
	if err != nil {
		t.Fatal(err)
	}
	id := ids.Next().String()
	s.Reserve(id, a, 0, 0, s.now)
	s.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: id, Node: "sidecar-1", Endpoint: a, At: s.now})
	s.expect("ended", 0, 0, 0)
}
