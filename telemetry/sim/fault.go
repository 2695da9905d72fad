package sim

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// FaultKind names what goes wrong.
type FaultKind uint8

// Fault kinds. What the factor means stands in parentheses, with its default.
const (
	// Slow makes every step longer (times as long; 4).
	Slow FaultKind = iota + 1
	// OutOfMemory kills all requests of the engine and answers every other with
	// 500 and CUDA's error text; /health says 503 (no factor).
	OutOfMemory
	// XID reports an XID error on the GPU page (the code; 79). With a code after
	// which NVIDIA's catalogue wants the GPU or the machine reset, the engine
	// also stands still. The end of the fault is that reset.
	XID
	// Frozen makes both metric pages repeat what they last said (no factor).
	Frozen
	// Blank empties the engine's page and leaves DCGM's blank values on the GPU
	// page (no factor).
	Blank
	// Crash resets all connections and refuses new ones; counters restart when
	// the server comes back (no factor).
	Crash
	// Throttle answers 429 (seconds of retry-after; 0, which sends none).
	Throttle
	// ErrorEvent ends streams with an error event inside their 200 (data events
	// before it; 0).
	ErrorEvent
	// Silence sends a stream's headers and then nothing, and to other requests
	// nothing at all (no factor).
	Silence

	faultKinds = iota + 1
)

type faultSpec struct {
	name      string
	factor    bool // takes one
	byDefault float64
	min, max  float64
	whole     bool // the factor is an integer
}

var faultSpecs = [faultKinds]faultSpec{
	Slow:        {name: "slow", factor: true, byDefault: 4, min: 0.01, max: 10_000},
	OutOfMemory: {name: "oom"},
	XID:         {name: "xid", factor: true, byDefault: 79, min: 1, max: 999, whole: true},
	Frozen:      {name: "frozen"},
	Blank:       {name: "blank"},
	Crash:       {name: "crash"},
	Throttle:    {name: "throttle", factor: true, byDefault: 0, min: 0, max: 3600},
	ErrorEvent:  {name: "errorevent", factor: true, byDefault: 0, min: 0, max: 1_000_000, whole: true},
	Silence:     {name: "silence"},
}

// String returns the kind's name as [ParseFault] reads it.
func (k FaultKind) String() string {
	if k == 0 || k >= faultKinds {
		return "FaultKind(" + strconv.Itoa(int(k)) + ")"
	}
	return faultSpecs[k].name
}

// parseKind accepts "429" for throttle too.
func parseKind(s string) (FaultKind, error) {
	if s == "429" {
		return Throttle, nil
	}
	names := make([]string, 0, faultKinds)
	for k := Slow; k < faultKinds; k++ {
		if faultSpecs[k].name == s {
			return k, nil
		}
		names = append(names, faultSpecs[k].name)
	}
	return 0, fmt.Errorf("found fault %q; accepted: %s", s, strings.Join(names, ", "))
}

// Fault is something that goes wrong with one server for a while.
type Fault struct {
	Kind FaultKind
	// At is when it begins: after the start of [Fleet.Run], or, if injected while
	// that runs, after the injection.
	At time.Duration
	// For is how long it lasts; 0 is until the end.
	For time.Duration
	// Factor is the kind's number; see there. NewFault and the parsers fill in
	// the default.
	Factor float64
}

// NewFault returns a fault with the default factor of its kind.
func NewFault(kind FaultKind, at, duration time.Duration) Fault {
	f := Fault{Kind: kind, At: at, For: duration}
	if kind < faultKinds {
		f.Factor = faultSpecs[kind].byDefault
	}
	return f
}

// String returns the fault without its server, as in "slow(4)@10s+30s".
func (f Fault) String() string {
	var b strings.Builder
	b.WriteString(f.Kind.String())
	if f.Kind > 0 && f.Kind < faultKinds && faultSpecs[f.Kind].factor {
		fmt.Fprintf(&b, "(%g)", f.Factor)
	}
	fmt.Fprintf(&b, "@%s", f.At)
	if f.For > 0 {
		fmt.Fprintf(&b, "+%s", f.For)
	}
	return b.String()
}

func (f Fault) check() error {
	if f.Kind == 0 || f.Kind >= faultKinds {
		return fmt.Errorf("found fault kind %d; accepted: 1 to %d", f.Kind, faultKinds-1)
	}
	if f.At < 0 || f.For < 0 {
		return fmt.Errorf("fault %s: start and length must not be negative", f)
	}
	return checkFactor(f.Kind, f.Factor)
}

func checkFactor(kind FaultKind, factor float64) error {
	spec := faultSpecs[kind]
	if !spec.factor {
		if factor != 0 {
			return fmt.Errorf("found factor %g; %s takes none", factor, kind)
		}
		return nil
	}
	if !(factor >= spec.min && factor <= spec.max) || spec.whole && factor != math.Trunc(factor) {
		what := "a number"
		if spec.whole {
			what = "a whole number"
		}
		return fmt.Errorf("found factor %g for %s; accepted: %s from %g to %g", factor, kind, what, spec.min, spec.max)
	}
	return nil
}

// faultForm is what ParseFault accepts.
const faultForm = "accepted: KIND[(FACTOR)]:SERVER[@START][+LENGTH], as in slow(8):h100-2@10s+30s"

// ParseFault reads a fault as it stands on a command line: "slow:h100-2@10s",
// "slow(8):h100-2@10s+30s", "crash:a100-1".
func ParseFault(s string) (server string, f Fault, err error) {
	head, rest, ok := strings.Cut(s, ":")
	if !ok {
		return "", Fault{}, fmt.Errorf("fault %q names no server; %s", s, faultForm)
	}
	f, err = parseFaultHead(head)
	if err != nil {
		return "", Fault{}, fmt.Errorf("fault %q: %w", s, err)
	}
	rest, length, hasLength := strings.Cut(rest, "+")
	server, start, hasStart := strings.Cut(rest, "@")
	if server == "" {
		return "", Fault{}, fmt.Errorf("fault %q names no server; %s", s, faultForm)
	}
	if hasStart {
		if f.At, err = parseDuration(start); err != nil {
			return "", Fault{}, fmt.Errorf("fault %q: start: %w", s, err)
		}
	}
	if hasLength {
		if f.For, err = parseDuration(length); err != nil {
			return "", Fault{}, fmt.Errorf("fault %q: length: %w", s, err)
		}
	}
	return server, f, nil
}

func parseFaultHead(head string) (Fault, error) {
	name, number, hasFactor := strings.Cut(head, "(")
	kind, err := parseKind(name)
	if err != nil {
		return Fault{}, err
	}
	f := NewFault(kind, 0, 0)
	if !hasFactor {
		return f, nil
	}
	number, closed := strings.CutSuffix(number, ")")
	if f.Factor, err = strconv.ParseFloat(number, 64); err != nil || !closed {
		return Fault{}, fmt.Errorf("found %q; accepted: a number in parentheses", head[len(name):])
	}
	return f, checkFactor(kind, f.Factor)
}

// parseDuration reads a duration that is not negative and has a unit.
func parseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 || s == "0" {
		return 0, fmt.Errorf("found %q; accepted: a duration with unit, such as 500ms or 10s", s)
	}
	return d, nil
}

// xidStops reports whether the engine stands still after an XID: codes for which
// NVIDIA's Xid catalogue names resetting the GPU, or restarting the machine, as
// immediate action (Ampere and newer).
func xidStops(code int) bool { return slices.Contains(stoppingXIDs, code) }

var stoppingXIDs = []int{
	46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 149, 155, 156, 158,
}
