package scorer

import (
	"bufio"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

var update = flag.Bool("update", false, "rewrite the outputs in testdata")

const tick = 200 * time.Millisecond

// direct takes the KV usage as the risk, so that scripts can say the risk.
type direct struct{}

func (direct) Name() string { return "direct" }

func (direct) Assess(w *telemetry.Window, _ Own, now time.Time) (Assessment, bool) {
	if w == nil || w.Age(now) > FreshAge {
		return Assessment{}, false
	}
	s, ok := w.Last(telemetry.HasKVUsage, now, FreshAge)
	if !ok {
		return Assessment{}, false
	}
	return AssessRisk(s.KVUsage), true
}

// TestScripts runs testdata/*.txt. A script is a list of blocks: commands, a
// line ----, and what they print, up to an empty line. Commands:
//
//	pool N [max=M] [notelemetry]    a new pool of endpoints a, b, c, … (always the first command)
//	add [C]                         one more endpoint, with capacity C
//	remove E                        takes endpoint E away
//	drain E, undrain E              the judge no longer sees E, sees it again; its samples go on
//	set E… key=value…               what E (or *) says from now on: risk, running, kvtokens, xid, xidevents
//	                                (a count of them), condition (of its GPUs: ok, drain, eject, lost), and
//	                                what we know of it: inflight, oom, refused, successes, errors, attempts
//	                                (of the last 5 s); bare words:
//	                                silent, speaking (its page fails, answers), frozen, moving (its
//	                                numbers stand still, move), noxid (the series is absent), nogpu (its
//	                                GPUs say nothing), noengine, engine (its server says nothing, speaks)
//	tick N                          N ticks of 200 ms; prints each endpoint after the last
//	trace N                         the same, and a line for each change of state or reason
//
// Each endpoint's risk is what the script says (see direct).
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(text))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != string(text) {
				t.Errorf("%s differs (go test -update rewrites it); got:\n%s", file, got)
			}
		})
	}
}

func runScript(t *testing.T, text string) string {
	t.Helper()
	var out, printed strings.Builder
	var f *fakePool
	inOutput := false
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		line := lines.Text()
		switch {
		case inOutput:
			if line != "" {
				continue
			}
			inOutput = false
			out.WriteString("\n")
		case line == "----":
			out.WriteString("----\n" + printed.String())
			printed.Reset()
			inOutput = true
		default:
			out.WriteString(line + "\n")
			if line == "" || line[0] == '#' {
				continue
			}
			words := strings.Fields(line)
			if words[0] == "pool" {
				f = newFakePool(t, words[1:])
				continue
			}
			if f == nil {
				t.Fatalf("%q before pool", line)
			}
			f.command(words, &printed)
		}
	}
	return out.String()
}

// fakePool is a pool of scripted endpoints.
type fakePool struct {
	t         *testing.T
	judge     *Judge
	now       time.Time
	begin     time.Time
	max       int
	telemetry bool
	next      int
	members   []*fakeEndpoint
	last      map[string]string
}

type fakeEndpoint struct {
	name           string
	address        netip.AddrPort
	capacity       float64
	window         *telemetry.Window
	sample         telemetry.Sample
	own            Own
	silent, frozen bool
	drained        bool
}

func newFakePool(t *testing.T, words []string) *fakePool {
	begin := time.Now()
	f := &fakePool{t: t, judge: NewJudge(direct{}), now: begin, begin: begin, telemetry: true, last: map[string]string{}}
	for _, w := range words[1:] {
		if w == "notelemetry" {
			f.telemetry = false
		} else if v, ok := strings.CutPrefix(w, "max="); ok {
			f.max = int(f.number(v))
		} else {
			t.Fatalf("pool: unknown word %q", w)
		}
	}
	for range int(f.number(words[0])) {
		f.add(1)
	}
	return f
}

func (f *fakePool) number(s string) float64 {
	f.t.Helper()
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		f.t.Fatal(err)
	}
	return v
}

func (f *fakePool) add(capacity float64) {
	e := &fakeEndpoint{
		name:     string(rune('a' + f.next%26)),
		address:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(f.next >> 8), byte(f.next)}), 8000),
		capacity: capacity,
		sample: telemetry.Sample{Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasGenerationTokens |
			telemetry.HasXID | telemetry.HasGPUUtil, Running: 1},
	}
	f.next++
	if f.telemetry {
		e.window = new(telemetry.Window)
	}
	f.members = append(f.members, e)
}

func (f *fakePool) command(words []string, out *strings.Builder) {
	f.t.Helper()
	switch words[0] {
	case "add":
		capacity := 1.0
		if len(words) > 1 {
			capacity = f.number(words[1])
		}
		f.add(capacity)
	case "remove":
		f.members = append([]*fakeEndpoint(nil), f.members...)
		for i, e := range f.members {
			if e.name == words[1] {
				f.members = append(f.members[:i], f.members[i+1:]...)
				break
			}
		}
	case "drain", "undrain":
		for _, e := range f.members {
			if e.name == words[1] {
				e.drained = words[0] == "drain"
			}
		}
	case "set":
		f.set(words[1:])
	case "tick", "trace":
		var verdicts []Verdict
		for range int(f.number(words[1])) {
			verdicts = f.step()
			f.changes(verdicts, words[0] == "trace", out)
		}
		f.print(verdicts, out)
	default:
		f.t.Fatalf("unknown command %q", words[0])
	}
}

func (f *fakePool) set(words []string) {
	f.t.Helper()
	var chosen []*fakeEndpoint
	for len(words) > 0 && (len(words[0]) == 1) {
		for _, e := range f.members {
			if words[0] == "*" || words[0] == e.name {
				chosen = append(chosen, e)
			}
		}
		words = words[1:]
	}
	for _, e := range chosen {
		for _, w := range words {
			f.setOne(e, w)
		}
	}
}

func (f *fakePool) setOne(e *fakeEndpoint, word string) {
	f.t.Helper()
	key, text, _ := strings.Cut(word, "=")
	v := 0.0
	if text != "" && key != "condition" {
		v = f.number(text)
	}
	switch key {
	case "risk":
		e.sample.KVUsage = v
	case "running":
		e.sample.Running = v
	case "kvtokens":
		e.sample.KVTokens = v
		e.sample.Known |= telemetry.HasKVTokens
	case "xid":
		e.sample.XID = int(v)
		e.sample.Known |= telemetry.HasXID
	case "xidevents":
		e.sample.XIDEvents = v
	case "condition":
		e.sample.Known |= telemetry.HasCondition
		for e.sample.Condition = telemetry.ConditionOK; e.sample.Condition.String() != text; e.sample.Condition++ {
			if e.sample.Condition > telemetry.ConditionLost {
				f.t.Fatalf("set: unknown condition %q", text)
			}
		}
	case "nogpu":
		e.sample.Known &^= telemetry.HasXID | telemetry.HasGPUUtil | telemetry.HasCondition
	case "noengine":
		e.sample.Known &^= telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasGenerationTokens
	case "engine":
		e.sample.Known |= telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasGenerationTokens
	case "noxid":
		e.sample.Known &^= telemetry.HasXID
	case "inflight":
		e.own.InFlight = int32(v)
	case "oom":
		e.own.OOMStreak = int(v)
	case "refused":
		e.own.ConnectStreak = int(v)
	case "errors":
		e.own.Errors5s = int(v)
	case "attempts":
		e.own.Attempts5s = int(v)
	case "successes":
		e.own.Successes = uint64(v)
	case "silent", "speaking":
		e.silent = key == "silent"
	case "frozen", "moving":
		e.frozen = key == "frozen"
	default:
		f.t.Fatalf("set: unknown word %q", word)
	}
}

// step lets one tick pass: each endpoint that speaks gives a sample, then all
// are judged.
func (f *fakePool) step() []Verdict {
	f.now = f.now.Add(tick)
	view := PoolView{Name: "p", MaxInFlight: f.max}
	for _, e := range f.members {
		if !e.frozen {
			e.sample.GenerationTokens++
		}
		if e.window != nil && !e.silent {
			e.sample.At = f.now
			e.window.Add(e.sample)
		}
		if !e.drained {
			view.Endpoints = append(view.Endpoints, EndpointView{Address: e.address, Capacity: e.capacity, Window: e.window, Own: e.own})
		}
	}
	return f.judge.Step(f.now, []PoolView{view})
}

// judged are the members that verdicts are of.
func (f *fakePool) judged() []*fakeEndpoint {
	var out []*fakeEndpoint
	for _, e := range f.members {
		if !e.drained {
			out = append(out, e)
		}
	}
	return out
}

func (f *fakePool) changes(verdicts []Verdict, show bool, out *strings.Builder) {
	judged := f.judged()
	for i, v := range verdicts {
		name := judged[i].name
		is := v.State.String() + " " + v.Reason.String()
		if was, ok := f.last[name]; show && ok && was != is {
			fmt.Fprintf(out, "%5.1fs  %s: %s -> %s\n", f.now.Sub(f.begin).Seconds(), name, was, is)
		}
		f.last[name] = is
	}
}

func (f *fakePool) print(verdicts []Verdict, out *strings.Builder) {
	judged := f.judged()
	for i, v := range verdicts {
		fmt.Fprintf(out, "%5.1fs  %s  %-9s %-9s risk %.2f smoothed %.2f weight %.3f", f.now.Sub(f.begin).Seconds(),
			judged[i].name, v.State, v.Reason, v.Risk, v.Smoothed, v.Weight)
		if v.KVFree >= 0 {
			fmt.Fprintf(out, " kvfree %d", v.KVFree)
		}
		if v.Stale {
			out.WriteString(" stale")
		}
		out.WriteString("\n")
	}
}
