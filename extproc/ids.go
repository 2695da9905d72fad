package extproc

import (
	"fmt"
	"math/bits"
	"strconv"
	"sync/atomic"
	"time"
)

// IDs hands out decision ids: strictly increasing per shard, also when the
// clock stands still or steps back while the process lives. No lock.
type IDs struct {
	shard uint16
	now   func() time.Time
	last  atomic.Int64 // milliseconds · sequences + sequence
}

// sequences is how many ids one millisecond has. A busier millisecond borrows
// from the next.
const sequences = 10_000

// MaxShard is the largest shard number.
const MaxShard = 999

// NewIDs returns a source of ids for a shard (0 … MaxShard); replicas must
// differ in it.
func NewIDs(shard int, now func() time.Time) (*IDs, error) {
	if shard < 0 || shard > MaxShard {
		return nil, fmt.Errorf("shard %d; accepted: 0 to %d", shard, MaxShard)
	}
	return &IDs{shard: uint16(shard), now: now}, nil
}

// ID is a decision id. The zero ID is none.
type ID struct {
	n     int64
	shard uint16
}

// Next returns an id greater than all before it.
func (s *IDs) Next() ID {
	wall := s.now().UnixMilli()*sequences + 1
	for {
		last := s.last.Load()
		next := max(wall, last+1)
		if s.last.CompareAndSwap(last, next) {
			return ID{next, s.shard}
		}
	}
}

// Time is the wall time of the id, in whole milliseconds.
func (id ID) Time() time.Time { return time.UnixMilli(id.n / sequences) }

// Append writes the id as timestamp_ms-shard-seq, 1718924567123-007-0001.
func (id ID) Append(b []byte) []byte {
	b = strconv.AppendInt(b, id.n/sequences, 10)
	b = append(b, '-', '0'+byte(id.shard/100), '0'+byte(id.shard/10%10), '0'+byte(id.shard%10), '-')
	seq := id.n % sequences
	return append(b, '0'+byte(seq/1000), '0'+byte(seq/100%10), '0'+byte(seq/10%10), '0'+byte(seq%10))
}

// String is the id as Append writes it.
func (id ID) String() string { return string(id.Append(make([]byte, 0, 24))) }

// Seed is the seed of every draw for this request: the id mixed by
// SplitMix64's finaliser (Steele, Lea, Flood 2014), so that neighbouring ids
// draw independently.
func (id ID) Seed() uint64 {
	z := uint64(id.n) + uint64(id.shard)*0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// SeedOf is the seed of the n-th try to decide, counted from 0: a request is
// decided again when the place that was decided on is taken meanwhile. The seed
// of the first is Seed, so a decision can be computed again from the id, the
// number of its try (wire.KeyTry) and the pools that it passed by (wire.KeyPast).
func (id ID) SeedOf(try int) uint64 { return id.Seed() + uint64(try) }

// ParseID reads what Append writes.
func ParseID(s string) (ID, error) {
	bad := func() (ID, error) {
		return ID{}, fmt.Errorf("decision id %q; accepted: milliseconds-shard-sequence, like 1718924567123-007-0001", s)
	}
	at := len(s) - len("-007-0001")
	if at < 1 || at > 15 || s[at] != '-' || s[at+4] != '-' {
		return bad()
	}
	ms, err1 := strconv.ParseUint(s[:at], 10, 63)
	shard, err2 := strconv.ParseUint(s[at+1:at+4], 10, 16)
	seq, err3 := strconv.ParseUint(s[at+5:], 10, 16)
	hi, n := bits.Mul64(ms, sequences)
	if err1 != nil || err2 != nil || err3 != nil || hi != 0 || n > 1<<62 {
		return bad()
	}
	return ID{int64(n + seq), uint16(shard)}, nil
}
