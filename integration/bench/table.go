package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
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

// commitOf names the commit of the checkout that holds a folder, with "-dirty" where
// files differ from it. Outside a checkout it is "unknown".
func commitOf(ctx context.Context, dir string) string {
	cmd := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

// table is everything that was measured.
type table struct {
	options
	machine   machine
	envoy     string
	command   string
	commit    string
	through   through
	highest   map[string][]float64
	decisions []decision
}

// bar is a ratio that may not be above a limit. It is missed when the whole
// interval lies above.
type bar struct {
	title             string
	over, under, less string  // pieces; less is subtracted from both
	most              float64 // 0: no limit
}

var cpuBars = []bar{
	{"full decision, headers only, over the stock server", "fairlead", "stock", "", 0.9},
	{"full decision, headers only, over the stock server, GC tuned", "fairlead", "tuned", "", 0.9},
	{"decision and all access-log handling, over the stock server, which handles no logs", "fairlead-logs", "stock-logs", "", 1.1},
	{"decision and all access-log handling, over the stock server, GC tuned", "fairlead-logs", "tuned-logs", "", 1.1},
	{"body fields, over the stock server behind the same filters", "fairlead-body", "stock-body", "", 0},
}

var latencyBars = []bar{
	{"headers only, over the stock server", "fairlead", "stock", "plain", 1.05},
	{"headers only, over the stock server, GC tuned", "fairlead", "tuned", "plain", 1.05},
	{"with access logs, over the stock server, Envoy logging in both", "fairlead-logs", "stock-logs", "plain", 1.15},
	{"with access logs, over the stock server, GC tuned, Envoy logging in both", "fairlead-logs", "tuned-logs", "plain", 1.15},
	{"with access logs, over the stock server with none", "fairlead-logs", "stock", "plain", 1.15},
	{"body fields, over the stock server behind the same filters", "fairlead-body", "stock-body", "plain", 0},
}

// notMeasured is the verdict where too few rounds say anything.
const notMeasured = "not measured"

// leastRounds is how many of a run's rounds must be valid: five of seven, and
// never fewer than seven.
func leastRounds(rounds int) int { return max(7, (5*rounds+6)/7) }

// verdict is how an interval from so many rounds stands to a bar.
func (b bar) verdict(i interval, rounds int) string {
	switch {
	case i.n < leastRounds(rounds) || !finite(i.low) || !finite(i.high):
		return notMeasured
	case b.most == 0:
		return ""
	case i.low > b.most:
		return "missed"
	case i.high > b.most:
		return "not missed (the interval reaches above)"
	}
	return "held"
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// limit is a bar's limit in words.
func (b bar) limit() string {
	if b.most == 0 {
		return "none"
	}
	return fmt.Sprintf("≤ %.2f", b.most)
}

// ratio is an interval in words.
func ratio(i interval) string {
	if i.n == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f (%.2f … %.2f)", i.median, i.low, i.high)
}

// digits is a number, or a dash where nothing was measured.
func digits(x float64, after int) string {
	if !finite(x) {
		return "–"
	}
	return strconv.FormatFloat(x, 'f', after, 64)
}

func (t *table) markdown() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# Benchmarks\n")
	line("Written by `%s` in `integration/bench` of commit %s on %s; run it again to have your own.\n",
		strings.TrimSpace(t.command), t.commit, t.machine.at.Format(time.DateOnly))
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
	line("Latency counts from the moment at which a request was due, however late it was sent.")
	line("CPU is microseconds per request: of the server under test by getrusage, less what it uses without requests (in brackets: with it), and of Envoy by its CPU clock.")
	line("The stock server is grpc-go as it comes with Envoy's generated types and an empty answer; Fairlead is the whole of `fairlead serve`:")
	line("budget and class, plan, admission with limits and shares, reservation in the ledger, metrics. Both end the stream after their answer.")
	line("Fairlead reads and writes its sockets by raw system calls, the stock server as package net does (docs/adr/0015).")
	line("`fairlead serve` sets its own garbage collection (a heap of 48 MiB at least); the stock server runs with Go's default (GOGC=100), and,")
	line("as \"GC tuned\", with GOGC=%d, which the same rule gives a heap as small as its own.\n", tunedGC)
	line("A run counts only if Envoy's counters and every answer's header say that each request was decided about (stock: answered) and none passed")
	line("without: no `failure_mode_allowed`, no `message_timeouts`, no `logs_dropped`; and if the machine carried the rate. It is repeated once; after that its round is left out.\n")
	line("| piece | body | requests/s | rounds | server CPU, µs | Envoy CPU, µs | p50, ms | p99, ms |")
	line("|---|--:|--:|--:|--:|--:|--:|--:|")
	for _, rate := range t.rates {
		for _, p := range pieces {
			if len(t.through.samples[cell{p.name, rate}]) == 0 {
				continue
			}
			i := medianOf(t.through.of(p.name, rate, p50Of))
			median := func(number func(sample) float64, unit float64, after int) string {
				return digits(medianOf(t.through.of(p.name, rate, number)).median/unit, after)
			}
			server := "–"
			if p.setup != plain {
				server = fmt.Sprintf("%s (%s)", median(cpuOf, 1e3, 0), median(grossOf, 1e3, 0))
			}
			line("| %s | %d B | %.0f | %d of %d | %s | %s | %s | %s |", p.title, p.body, rate, i.n, t.rounds, server,
				median(func(s sample) float64 { return float64(s.envoy) }, 1e3, 0), median(p50Of, 1e6, 2),
				median(func(s sample) float64 { return float64(s.p99) }, 1e6, 2))
		}
	}
	idle := func(s setup) string { return digits(100*medianOf(t.through.idle[s]).median, 2) }
	line("\nWithout requests `fairlead serve` uses %s %% of one CPU here (a plan every 50 ms, 8 endpoints), the stock server %s %%.\n", idle(fairleadBare), idle(stockBare))
}

func (t *table) ratios(line func(string, ...any)) {
	line("## Ratios\n")
	line("Each ratio is taken within a round; the table has the median and, in brackets, a distribution-free interval of at least 95 %% for it")
	line("(order statistics; the whole range below 9 rounds). A bar is missed when the whole interval lies above it.")
	line("A round is valid if both of its runs count and both sides are above 0: of a latency that is lost in the noise nothing can be said.")
	line("With fewer than %d valid of %d rounds the verdict is \"%s\".\n", leastRounds(t.rounds), t.rounds, notMeasured)
	line("CPU of the server per request, Fairlead's over the other's; \"gross\" includes what each uses without requests, \"net\" doesn't:\n")
	line("| CPU ratio | requests/s | bar | net | valid | | gross | valid | |")
	line("|---|--:|--:|--:|--:|---|--:|--:|---|")
	for _, b := range cpuBars {
		for _, rate := range t.rates {
			net := t.through.ratio(b.over, b.under, b.less, rate, cpuOf)
			gross := t.through.ratio(b.over, b.under, b.less, rate, grossOf)
			line("| CPU: %s | %.0f | %s | %s | %d of %d | %s | %s | %d of %d | %s |", b.title, rate, b.limit(),
				ratio(net), net.n, t.rounds, b.verdict(net, t.rounds), ratio(gross), gross.n, t.rounds, b.verdict(gross, t.rounds))
		}
	}
	line("\nAdded median latency, Fairlead's over the other's; added is what comes on top of \"no ext_proc\" in the same round.\n" +
		"A server \"with none\" has another Envoy configuration: what Envoy itself takes for its logs is in that ratio too.\n")
	line("| latency ratio | requests/s | bar | ratio | valid | |")
	line("|---|--:|--:|--:|--:|---|")
	for _, b := range latencyBars {
		for _, rate := range t.rates {
			i := t.through.ratio(b.over, b.under, b.less, rate, p50Of)
			line("| added p50: %s | %.0f | %s | %s | %d of %d | %s |", b.title, rate, b.limit(), ratio(i), i.n, t.rounds, b.verdict(i, t.rounds))
		}
	}
	line("")
}

func (t *table) highestRates(line func(string, ...any)) {
	if t.searches == 0 {
		return
	}
	line("## Highest rate with p99 within %v\n", mostP99)
	line("Open loop, %d B bodies where no other length is named, one Envoy worker; steps of %.0f %%, then the last step halved %d times; %d searches.", smallBody, 100*(coarseStep-1), fineSteps, t.searches)
	line("Each search begins at %d requests/s, the lowest rate that is tried; \"< %d\" says that this one failed already.", lowestRate, lowestRate)
	line("Not searched: %s.\n", strings.Join(notSearched(), "; "))
	line("| piece | requests/s, median | lowest … highest |")
	line("|---|--:|--:|")
	for _, name := range searched {
		for _, p := range pieces {
			if p.name == name {
				i := medianOf(t.highest[name])
				line("| %s | %s | %s … %s |", p.title, rateText(i.median), rateText(i.low), rateText(i.high))
			}
		}
	}
	line("")
}

// rateText is a highest rate in words; below lowestRate none was tried.
func rateText(rate float64) string {
	if rate < lowestRate {
		return fmt.Sprintf("< %d", lowestRate)
	}
	return digits(rate, 0)
}

// notSearched are the titles of the pieces whose highest rate is not looked for.
func notSearched() (titles []string) {
	for _, p := range pieces {
		if !slices.Contains(searched, p.name) {
			titles = append(titles, p.title)
		}
	}
	return titles
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
