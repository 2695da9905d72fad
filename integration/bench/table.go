package main

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// machine is where it ran.
type machine struct {
	cpu, kernel, grpc string
	cores             int
	at                time.Time
}

func thisMachine() machine {
	m := machine{cpu: runtime.GOARCH, cores: runtime.NumCPU(), at: time.Now().UTC(), grpc: "?", kernel: "?"}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == "model name" {
				m.cpu = strings.TrimSpace(value)
				break
			}
		}
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.kernel = unix.ByteSliceToString(name.Sysname[:]) + " " + unix.ByteSliceToString(name.Release[:])
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, d := range info.Deps {
			if d.Path == "google.golang.org/grpc" {
				m.grpc = d.Version
			}
		}
	}
	return m
}

// table is everything that was measured.
type table struct {
	options
	machine   machine
	envoy     string
	command   string
	through   through
	highest   map[string][]float64
	decisions []decision
}

// bar is a ratio that may not be above a limit. It is missed when the whole
// interval lies above.
type bar struct {
	title             string
	over, under, less string // pieces; less is subtracted from both
	number            func(sample) float64
	most              float64 // 0: no limit
}

var bars = []bar{
	{"CPU: Fairlead's full decision, headers only, over the stock server", "fairlead", "stock", "", cpuOf, 0.9},
	{"CPU: decision and all access-log handling, over the stock server, which handles none", "fairlead-logs", "stock-logs", "", cpuOf, 1.1},
	{"added p50: Fairlead, headers only, over the stock server", "fairlead", "stock", "plain", p50Of, 1.05},
	{"added p50 with access logs: Fairlead over the stock server, Envoy logging in both", "fairlead-logs", "stock-logs", "plain", p50Of, 1.15},
	{"added p50: Fairlead with access logs over the stock server with none", "fairlead-logs", "stock", "plain", p50Of, 1.15},
	{"CPU: Fairlead with body fields over the stock server with the same", "fairlead-body", "stock-body", "", cpuOf, 0},
	{"added p50 with body fields: Fairlead over the stock server", "fairlead-body", "stock-body", "plain", p50Of, 0},
	{"CPU: as the first line, idle work included", "fairlead", "stock", "", grossOf, 0},
	{"CPU: as the second line, idle work included", "fairlead-logs", "stock-logs", "", grossOf, 0},
}

// verdict is how an interval stands to a bar.
func (b bar) verdict(i interval) string {
	switch {
	case b.most == 0:
		return ""
	case i.low > b.most:
		return "missed"
	case i.high > b.most:
		return "not missed (the interval reaches above)"
	}
	return "held"
}

func (t *table) markdown() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# Benchmarks\n")
	line("Written by `%s` in `integration/bench` on %s; run it again to have your own.\n", strings.TrimSpace(t.command), t.machine.at.Format(time.DateOnly))
	line("Machine: %s, %d CPUs, %s. %s, Envoy %s with one worker, grpc-go %s.", t.machine.cpu, t.machine.cores, t.machine.kernel, runtime.Version(), t.envoy, t.machine.grpc)
	line("Load, Envoy, upstream servers and the server under test share these CPUs, so the ratios mean more than the numbers.\n")
	t.throughEnvoy(line)
	t.ratios(line)
	t.highestRates(line)
	t.decided(line)
	return b.String()
}

func (t *table) throughEnvoy(line func(string, ...any)) {
	line("## Through Envoy, at a fixed rate\n")
	line("Medians of %d interleaved rounds of %v each; open loop, a request as an official SDK sends it, an answer at once from the upstream.", t.rounds, t.each)
	line("CPU is microseconds per request: of the server under test by getrusage, less what it uses without requests, and of Envoy by its CPU clock.")
	line("The stock server is grpc-go as it comes with Envoy's generated types and an empty answer; Fairlead is the whole of `fairlead serve`:")
	line("budget and class, plan, admission with limits and shares, reservation in the ledger, metrics. Both end the stream after their answer.\n")
	line("| piece | body | requests/s | server CPU, µs | Envoy CPU, µs | p50, ms | p99, ms |")
	line("|---|--:|--:|--:|--:|--:|--:|")
	for _, rate := range t.rates {
		for _, p := range pieces {
			if len(t.through.samples[cell{p.name, rate}]) == 0 {
				continue
			}
			server := "–"
			if p.setup != plain {
				server = fmt.Sprintf("%.0f", medianOf(t.through.of(p.name, rate, cpuOf)).median/1e3)
			}
			median := func(number func(sample) float64) float64 { return medianOf(t.through.of(p.name, rate, number)).median }
			line("| %s | %d B | %.0f | %s | %.0f | %.2f | %.2f |", p.title, p.body, rate, server,
				median(func(s sample) float64 { return float64(s.envoy) })/1e3, median(p50Of)/1e6,
				median(func(s sample) float64 { return float64(s.p99) })/1e6)
		}
	}
	idle := medianOf(t.through.idle[fairleadBare])
	line("\nWithout requests `fairlead serve` uses %.2f %% of one CPU here (a plan every 50 ms, 8 endpoints).\n", 100*idle.median)
}

func (t *table) ratios(line func(string, ...any)) {
	line("## Ratios\n")
	line("Each ratio is taken within a round; the table has the median of %d rounds and a distribution-free interval of at least 95 %% for it", t.rounds)
	line("(order statistics; the whole range below 9 rounds). Added latency is what comes on top of \"no ext_proc\" in the same round.")
	line("A bar is missed when the whole interval lies above it.\n")
	line("| ratio | requests/s | median | interval | bar | |")
	line("|---|--:|--:|--:|--:|---|")
	for _, r := range bars {
		for _, rate := range t.rates {
			i := t.through.ratio(r.over, r.under, r.less, rate, r.number)
			most := ""
			if r.most > 0 {
				most = fmt.Sprintf("≤ %.2f", r.most)
			}
			line("| %s | %.0f | %.2f | %.2f … %.2f | %s | %s |", r.title, rate, i.median, i.low, i.high, most, r.verdict(i))
		}
	}
	line("")
}

func (t *table) highestRates(line func(string, ...any)) {
	if t.searches == 0 {
		return
	}
	line("## Highest rate with p99 within %v\n", mostP99)
	line("Open loop, %d B bodies, one Envoy worker; steps of %.0f %%, then the last step halved %d times; %d searches.\n", smallBody, 100*(coarseStep-1), fineSteps, t.searches)
	line("| piece | requests/s, median | lowest … highest |")
	line("|---|--:|--:|")
	for _, name := range searched {
		for _, p := range pieces {
			if p.name == name {
				i := medianOf(t.highest[name])
				line("| %s | %.0f | %.0f … %.0f |", p.title, i.median, i.low, i.high)
			}
		}
	}
	line("")
}

// decided are the rows of the comparison of decisions.
func (t *table) decided(line func(string, ...any)) {
	if len(t.decisions) == 0 {
		return
	}
	line("## One decision\n")
	line("gateway-api-inference-extension v1.5.0's scheduler with its default scorers, weights and picker, beside Fairlead's `plan.Decide` and beside the whole")
	line("ext_proc handler without a transport (reading Envoy's message, class, decision, admission, ledger, answer). In one process, %d rounds in turns;", t.rounds)
	line("the peer's parsing, scraping and ext_proc server are not in it. A handler does more than the peer's scheduler, so its ratio is a lower bound.\n")
	line("| endpoints | peer's scheduler | allocations | `plan.Decide` | allocations | handler | allocations | peer / Decide | peer / handler |")
	line("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
	var sizes []int
	by := map[int]map[string][]decision{}
	for _, d := range t.decisions {
		if by[d.N] == nil {
			by[d.N] = map[string][]decision{}
			sizes = append(sizes, d.N)
		}
		by[d.N][d.What] = append(by[d.N][d.What], d)
	}
	for _, n := range sizes {
		median := func(what string, number func(decision) float64) float64 {
			var all []float64
			for _, d := range by[n][what] {
				all = append(all, number(d))
			}
			return medianOf(all).median
		}
		ratio := func(under string) interval {
			var all []float64
			for i, d := range by[n]["gaie"] {
				all = append(all, d.Nanoseconds/by[n][under][i].Nanoseconds)
			}
			return medianOf(all)
		}
		took := func(what string) string {
			return duration(median(what, func(d decision) float64 { return d.Nanoseconds }))
		}
		allocations := func(what string) float64 {
			return math.Floor(median(what, func(d decision) float64 { return d.Allocations }))
		}
		a, b := ratio("decide"), ratio("handler")
		line("| %d | %s | %.0f | %s | %.0f | %s | %.0f | %.0f (%.0f … %.0f) | %.1f (%.1f … %.1f) |", n,
			took("gaie"), allocations("gaie"), took("decide"), allocations("decide"), took("handler"), allocations("handler"),
			a.median, a.low, a.high, b.median, b.low, b.high)
	}
}

// duration is nanoseconds with three digits.
func duration(ns float64) string {
	switch {
	case ns < 1e3:
		return fmt.Sprintf("%.0f ns", ns)
	case ns < 1e5:
		return fmt.Sprintf("%.1f µs", ns/1e3)
	}
	return fmt.Sprintf("%.0f µs", ns/1e3)
}
