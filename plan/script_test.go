package plan

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

var update = flag.Bool("update", false, "rewrite the decisions in testdata")

// TestScripts runs testdata/*.txt. A script describes a fleet and then requests;
// below each request stand the decisions for seeds 1, 2, 3 … Lines:
//
//	pool NAME [spill=0.7] [backlogged=LEVEL]   then its endpoints:
//	  ADDRESS [zone=] [weight=1] [max=0] [inflight=0] [kv=-1] [risk=0] [closed=0] [trial=N] [state=neutral]
//	route NAME split=A,B [fallback=C,D] [affinity=none] [maxoutput=0] [noroom=pass]
//	live N N N …                               in flight, endpoint by endpoint
//	decide [route=NAME] arm=POOL|none [level=0] [budget=0] [prompt=0] [session=KEY] [zone=] [strategy=dynamic] [generates=true] [seeds=4]
//	> …                                        a decision (written by -update)
//
// The chosen endpoint stands first with its count, then the runner-up with its
// own, then the targets of further attempts. Who is refused for now waits for a pool.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("decisions differ (go test ./plan -update rewrites them); got\n%s", got)
			}
		})
	}
}

type script struct {
	in   Inputs
	live counts
	plan *Plan // nil after the fleet changed
}

func runScript(t *testing.T, text string) string {
	var s script
	var out strings.Builder
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		if strings.HasPrefix(line, "> ") {
			continue
		}
		out.WriteString(line + "\n")
		decisions, err := s.line(line)
		if err != nil {
			t.Fatalf("line %d: %q: %v", i+1, line, err)
		}
		out.WriteString(decisions)
	}
	return out.String()
}

func (s *script) line(line string) (string, error) {
	words := strings.Fields(line)
	if len(words) == 0 || strings.HasPrefix(words[0], "#") {
		return "", nil
	}
	args := make(map[string]string)
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		args[key] = value
	}
	switch words[0] {
	case "pool":
		s.plan = nil
		spill, _ := strconv.ParseFloat(args["spill"], 64)
		p := PoolInput{Name: words[1], SpillAt: spill}
		if level, err := strconv.Atoi(args["backlogged"]); err == nil {
			p.Backlogged[level] = true
		}
		s.in.Pools = append(s.in.Pools, p)
	case "route":
		s.plan = nil
		r := RouteInput{Name: words[1], Split: strings.Split(args["split"], ","), DefaultBudget: 512}
		if args["fallback"] != "" {
			r.Fallback = strings.Split(args["fallback"], ",")
		}
		if args["affinity"] == "session" {
			r.Affinity = fleet.AffinitySession
		}
		most, _ := strconv.Atoi(args["maxoutput"])
		r.MaxOutput, r.Oversize = fleet.Tokens(most), fleet.OversizeRefuse
		if args["noroom"] == "refuse" {
			r.NoRoom = fleet.OversizeRefuse
		}
		s.in.Routes = append(s.in.Routes, r)
	case "live":
		s.live = nil
		for _, w := range words[1:] {
			n, err := strconv.Atoi(w)
			if err != nil {
				return "", err
			}
			s.live = append(s.live, int32(n))
		}
	case "decide":
		return s.decide(args)
	default:
		s.plan = nil
		return "", s.endpoint(words[0], args)
	}
	return "", nil
}

func (s *script) endpoint(address string, args map[string]string) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	slot := uint32(0)
	for _, p := range s.in.Pools {
		slot += uint32(len(p.Endpoints))
	}
	e := EndpointInput{Address: at, Slot: slot, Weight: 1, KVFree: -1, State: fleet.StateNeutral}
	for key, value := range args {
		n, err := strconv.ParseFloat(value, 64)
		switch {
		case key == "zone":
			e.Zone = value
		case key == "state" && value == "unknown":
			e.State = fleet.StateUnknown
		case key == "state" && value == "ejected":
			e.State = fleet.StateEjected
		case key == "state" && value == "draining":
			e.State = fleet.StateDraining
		case err != nil:
			return err
		case key == "weight":
			e.Weight = n
		case key == "max":
			e.MaxInFlight = int32(n)
		case key == "inflight":
			e.InFlight = int32(n)
		case key == "kv":
			e.KVFree = fleet.Tokens(n)
		case key == "kvsize":
			e.KVSize = fleet.Tokens(n)
		case key == "closed":
			e.Closed = n != 0
		case key == "trial":
			e.Failing, e.Trial = true, int32(n)
		case key == "risk":
			e.Risk = fleet.Risk(n)
		default:
			return fmt.Errorf("unknown word %q", key)
		}
	}
	pool := &s.in.Pools[len(s.in.Pools)-1]
	pool.Endpoints = append(pool.Endpoints, e)
	return nil
}

func (s *script) decide(args map[string]string) (string, error) {
	if s.plan == nil {
		var err error
		if s.plan, err = Compile(s.in); err != nil {
			return "", err
		}
		n := 0
		for _, p := range s.in.Pools {
			n += len(p.Endpoints)
		}
		s.live = append(s.live, make(counts, max(0, n-len(s.live)))...)
	}
	c := Class{Arm: NoPool, Strategy: fleet.StrategyDynamic, Generates: args["generates"] != "false"}
	if name, given := args["route"]; given {
		id, found := s.plan.Route(name)
		if !found {
			id = -1
		}
		c.Route = id
	}
	if id, found := s.plan.Pool(args["arm"]); found {
		c.Arm = id
	}
	if args["strategy"] == "legacy" {
		c.Strategy = fleet.StrategyLegacy
	}
	level, _ := strconv.Atoi(args["level"])
	c.Level = fleet.BurstLevel(level)
	budget, _ := strconv.Atoi(args["budget"])
	c.Budget = fleet.Tokens(budget)
	prompt, _ := strconv.Atoi(args["prompt"])
	c.Prompt, c.PromptAtLeast = fleet.Tokens(prompt), fleet.Tokens(prompt)
	if least, err := strconv.Atoi(args["least"]); err == nil {
		c.PromptAtLeast = fleet.Tokens(least)
	}
	c.Zone = s.plan.Zone(args["zone"])
	c.Session = SessionOf([]byte(args["session"]))
	seeds, err := strconv.Atoi(args["seeds"])
	if err != nil {
		seeds = 4
	}
	var out strings.Builder
	for seed := range seeds {
		d := s.plan.Decide(c, uint64(seed+1), s.live)
		out.WriteString("> " + s.show(d) + "\n")
	}
	return out.String(), nil
}

func (s *script) show(d Decision) string {
	name := func(p Pick) string { return s.plan.PoolName(p.Pool) + "/" + s.plan.AddressText(p) }
	action := [...]string{"?", "steer", "leave", "refuse"}[d.Action]
	out := fmt.Sprintf("%s %s", action, d.Reason)
	if d.Moved {
		out += " moved"
	} else if d.Regroup {
		out += " regroup"
	}
	if d.Reason == ReasonOversize || d.Reason == ReasonNoRoom || d.Reason == ReasonNeverFits {
		out += fmt.Sprintf(": %d tokens fit", d.Fits)
	}
	if d.Reason == ReasonAllBusy || d.Reason == ReasonNoRoom {
		out += ", waits for " + s.plan.PoolName(d.Arm)
	}
	if d.N == 0 {
		return out
	}
	out += fmt.Sprintf(": %s (%d) against %s (%d), then", name(d.Picks[0]), d.LiveChosen, name(d.RunnerUp), d.LiveRunnerUp)
	for _, p := range d.Picks[1:d.N] {
		out += " " + name(p)
	}
	return out
}
