package dcgm

import (
	"math"
	"testing"
	"time"
)

func TestNumberKnowsEveryBlank(t *testing.T) {
	ints := func(v int64) sample { return sample{kind: typeInt, bits: uint64(v)} }
	doubles := func(v float64) sample { return sample{kind: typeDouble, bits: math.Float64bits(v)} }
	for _, c := range []struct {
		name   string
		sample sample
		want   float64
		ok     bool
	}{
		{"zero", ints(0), 0, true},
		{"negative", ints(-7), -7, true},
		{"int64", ints(0x7ffffffffffffff0), 0, false},
		{"int64 no permission", ints(0x7ffffffffffffff3), 0, false},
		{"int64 below the blanks", ints(0x7fffffffffffffef), 0x7fffffffffffffef, true},
		{"int32", ints(0x7ffffff0), 0, false},
		{"int32 last", ints(0x7fffffff), 0, false},
		{"below the int32 blanks", ints(0x7fffffef), 0x7fffffef, true},
		{"beyond int32", ints(0x80000000), 0x80000000, true},
		{"stamp", sample{kind: typeStamp, bits: 5}, 5, true},
		{"double", doubles(0.25), 0.25, true},
		{"double blank", doubles(140737488355328.0), 0, false},
		{"double not supported", doubles(140737488355330.0), 0, false},
		{"infinity", doubles(math.Inf(1)), 0, false},
		{"text", sample{kind: typeText, text: "7"}, 0, false},
		{"binary", sample{kind: typeBinary, bits: 7}, 0, false},
	} {
		if v, ok := c.sample.number(); v != c.want || ok != c.ok {
			t.Errorf("%s: %v, %v; want %v, %v", c.name, v, ok, c.want, c.ok)
		}
	}
	for text, ok := range map[string]bool{
		"NVIDIA H100": true, "": false, "<<<NULL>>>": false, "<<<NOT_FOUND>>>": false, "<<<NOT_SUPPORTED>>>": false, "<<<NOT_PERM>>>": false,
	} {
		s := sample{kind: typeText, text: text}
		if _, got := s.string(); got != ok {
			t.Errorf("%q is text: %v; want %v", text, got, ok)
		}
	}
}

func TestProcessChecksTheStruct(t *testing.T) {
	raw := func(version, pid byte) []byte {
		return []byte{version, 0, 0, 1, pid, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	}
	s := sample{kind: typeBinary}
	if s.process(raw(16, 2)); s.status != 0 || s.bits != 258 {
		t.Errorf("process %d, status %d; want 258, 0", s.bits, s.status)
	}
	s = sample{kind: typeBinary}
	if s.process(raw(24, 2)); s.status == 0 {
		t.Error("a struct of another version is read")
	}
}

func TestGatesRefuseWhatIsNoReading(t *testing.T) {
	for at, values := range map[slot][]float64{
		slotUtil: {-1, 101, 334905, 4294967295}, slotPower: {-1, 1e5, math.NaN()}, slotDRAMActive: {-0.1, 1.2, math.Inf(-1)},
		slotEnergy: {-1}, slotFBUsed: {-1, 1e9}, slotPCIeRX: {-5, 1e13}, slotMIGMode: {2}, slotRecoveryAction: {8, 256}, slotMargin: {-200, 300},
	} {
		spec := &fields[at]
		for _, v := range values {
			var tr track
			s := sample{kind: typeDouble, stamp: 1, bits: math.Float64bits(v)}
			if got := tr.take(spec, &s, time.Now(), 1); got != outOfRange || tr.good {
				t.Errorf("field %d: %v is taken as %v, good %v", spec.id, v, got, tr.good)
			}
		}
	}
	for i := range fields {
		spec := &fields[i]
		if spec.id == 0 || spec.cadence == 0 || !(spec.max > spec.min) || slotOf[spec.id] != slot(i) {
			t.Errorf("slot %d: %+v", i, spec)
		}
		for kind := wholeGPU; kind <= gpuInstance; kind++ {
			n := 0
			for _, w := range watchSpecs[kind] {
				for _, s := range w.slots {
					if s == slot(i) {
						n++
					}
				}
			}
			if n > 1 || kind == wholeGPU && n == 0 {
				t.Errorf("field %d is watched %d times for kind %d", spec.id, n, kind)
			}
		}
	}
}

// A track is fed one stamp per 200 ms by the local clock; what it calls the age
// must not depend on the host engine's clock.
func TestAgeFollowsFromArrivalsAndDifferences(t *testing.T) {
	spec := &fields[slotPower]
	begun := time.Now()
	value := func(stamp int64) *sample {
		return &sample{kind: typeDouble, stamp: stamp, bits: math.Float64bits(100)}
	}
	known := func(tr *track, after time.Duration) bool {
		_, ok := tr.known(begun.Add(after), time.Second)
		return ok
	}
	for _, clock := range []int64{1, 1e15, 4e15} {
		var tr track
		tr.take(spec, value(clock), begun, clock+900_000)
		if !known(&tr, 100*time.Millisecond) || known(&tr, 101*time.Millisecond) {
			t.Errorf("clock %d: a value 0.9 s older than the newest counts for other than 0.1 s", clock)
		}
		// The same sample again makes it no younger.
		tr.take(spec, value(clock), begun.Add(200*time.Millisecond), clock+1_100_000)
		if known(&tr, 200*time.Millisecond) {
			t.Errorf("clock %d: a sample seen twice is young again", clock)
		}
		// A clock that stepped back five seconds still brings news.
		if got := tr.take(spec, value(clock-5_000_000+6_000_000), begun.Add(400*time.Millisecond), clock+1_000_000); got != accepted {
			t.Errorf("clock %d: %v", clock, got)
		}
		if !known(&tr, 1400*time.Millisecond) || known(&tr, 1401*time.Millisecond) {
			t.Errorf("clock %d: the newest sample counts for other than a second", clock)
		}
	}
}

func TestXIDLedgerCountsStamps(t *testing.T) {
	x := func(stamp, code int64) sample {
		return sample{kind: typeInt, field: 230, stamp: stamp, bits: uint64(code)}
	}
	l := &xidLedger{}
	step := func(what string, fresh, code int, events float64, samples ...sample) {
		t.Helper()
		if got := l.look(samples); got != fresh || l.code != code || l.events != events {
			t.Errorf("%s: %d new, last %d, %v events; want %d, %d, %v", what, got, l.code, l.events, fresh, code, events)
		}
	}
	step("before the source", 0, 13, 0, x(5, 8), x(6, 13))
	step("nothing new", 0, 13, 0, x(5, 8), x(6, 13))
	step("two at once", 2, 45, 2, x(6, 13), x(7, 62), x(8, 45))
	step("a repeat", 1, 45, 3, x(7, 62), x(8, 45), x(9, 45))
	step("the cache is empty", 0, 45, 3)
	step("it comes back", 0, 45, 3, x(8, 45), x(9, 45))
	step("zero and blank", 0, 45, 3, x(10, 0), x(11, blankInt64))
	step("the clock went back", 1, 79, 4, x(2, 79))
	many := make([]sample, 0, 1000)
	for i := range int64(1000) {
		many = append(many, x(1000+i, 31))
	}
	step("a flood", maxXIDsKept, 31, 4+maxXIDsKept, many...)
	if len(l.seen) > maxXIDsKept {
		t.Errorf("%d stamps are kept; want at most %d", len(l.seen), maxXIDsKept)
	}
}
