package dcgm

import (
	"encoding/binary"
	"math"
	"strings"
	"time"
)

// DCGM's field types (dcgm_fields.h).
const (
	typeBinary = 'b'
	typeDouble = 'd'
	typeInt    = 'i'
	typeText   = 's'
	typeStamp  = 't'
)

// Blanks (dcgm_structs.h): these and what lies above are not values but reasons
// for the lack of one: not found, not supported, no permission.
const (
	blankInt32 = 0x7ffffff0
	maxInt32   = 0x7fffffff
	blankInt64 = 0x7ffffffffffffff0
	blankFP64  = 140737488355328.0
)

// entity is a GPU or a MIG instance by DCGM's numbers.
type entity struct {
	group uint8
	id    uint32
}

// Entity groups (dcgm_field_entity_group_t).
const (
	groupGPU      = 1
	groupInstance = 4
)

// sample is one value as DCGM gave it.
type sample struct {
	entity entity
	field  fieldID
	kind   byte   // DCGM's field type
	status int    // DCGM's status of this value
	stamp  int64  // the host engine's clock, µs since 1970
	bits   uint64 // the first eight bytes of the value
	text   string // of strings
}

// number returns the value, or false if it is blank or none.
func (s *sample) number() (float64, bool) {
	switch s.kind {
	case typeInt, typeStamp:
		v := int64(s.bits)
		// Some fields hold 32-bit values, and so 32-bit blanks, in 64 bits.
		if v >= blankInt64 || v >= blankInt32 && v <= maxInt32 {
			return 0, false
		}
		return float64(v), true
	case typeDouble:
		v := math.Float64frombits(s.bits)
		if v >= blankFP64 {
			return 0, false
		}
		return v, true
	}
	return 0, false
}

// string returns the text, or false if it is blank or none.
func (s *sample) string() (string, bool) {
	blank := strings.HasPrefix(s.text, "<<<") && strings.Contains(s.text, ">>>")
	return s.text, s.kind == typeText && s.text != "" && !blank
}

// verdict is what became of a sample.
type verdict uint8

const (
	unchanged  verdict = iota + 1 // the sample seen before
	accepted                      // a value
	blank                         // one of DCGM's blanks
	outOfRange                    // not a reading
	noData                        // no sample was ever taken
)

// track is the history of one field of one entity.
type track struct {
	seen      bool
	stamp     int64     // of the newest sample
	sampledAt time.Time // when that was taken, by the local clock

	value   float64 // of the newest good sample
	good    bool    // there is one
	goodAt  time.Time
	isBlank bool // the newest sample gave no number

	hadValue   bool // this connection gave a value
	blankReads int  // reads in a row without a number, since then
}

// changed reports whether the sample is another one than the last.
func (t *track) changed(s *sample) bool { return !t.seen || s.stamp != t.stamp }

// take adds a sample that was read by a call begun at the given moment. newest
// is the newest stamp among the samples that changed in the same read: a sample
// is as much older than the call as its stamp lies before that one. Neither the
// host engine's clock as such nor a step of it matters, since stamps are only
// compared within a read.
func (t *track) take(spec *fieldSpec, s *sample, begun time.Time, newest int64) verdict {
	if s.status != 0 || s.stamp <= 0 {
		t.noNumber()
		return noData
	}
	if !t.changed(s) {
		if t.isBlank {
			t.noNumber()
		}
		return unchanged
	}
	lag := time.Duration(max(0, newest-s.stamp)) * time.Microsecond
	t.seen, t.stamp, t.sampledAt = true, s.stamp, begun.Add(-lag)
	v, ok := s.number()
	if !ok {
		t.noNumber()
		return blank
	}
	if !(v >= spec.min && v <= spec.max) { // also not for NaN
		// The last good value stands until it is too old.
		t.isBlank = false
		return outOfRange
	}
	t.value, t.good, t.goodAt = v, true, t.sampledAt
	t.isBlank, t.hadValue, t.blankReads = false, true, 0
	return accepted
}

func (t *track) noNumber() {
	t.isBlank = true
	if t.hadValue {
		t.blankReads++
	}
}

// known returns the value if it counts at now.
func (t *track) known(now time.Time, maxAge time.Duration) (float64, bool) {
	return t.value, t.good && !t.isBlank && now.Sub(t.goodAt) <= maxAge
}

// stale reports whether only its age keeps the value from counting.
func (t *track) stale(now time.Time, maxAge time.Duration) bool {
	return t.good && !t.isBlank && now.Sub(t.goodAt) > maxAge
}

// runningProcessVersion is the version word of dcgmRunningProcess_v1: its size,
// and 1 in the top byte (MAKE_DCGM_VERSION).
const runningProcessVersion = 1<<24 | 16

// process reads a dcgmRunningProcess_t: version, process id, memory. bits is
// then the process id. Another struct makes the sample one without data.
func (s *sample) process(raw []byte) {
	version, pid := binary.NativeEndian.Uint32(raw), binary.NativeEndian.Uint32(raw[4:])
	if s.bits = uint64(pid); version != runningProcessVersion || pid == 0 {
		s.status = -1
	}
}
