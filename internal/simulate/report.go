package simulate

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// WriteTable prints the comparison for people.
func (c *Comparison) WriteTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%d GPUs (%s, scenario %s), %s.\n", c.GPUs, c.Profile, c.Scenario, c.About)
	fmt.Fprintf(&b, "%.1f requests/s on average, load %.2f of the %.1f that the fleet sustains; %gs, the first %gs not counted; %d seeds, which begin the arrivals at different points.\n",
		c.Rate, c.Load, c.Capacity, c.Seconds, c.Warmup, len(c.Seeds))
	if c.TooLong > 0 {
		fmt.Fprintf(&b, "%d requests were left out: too long for a GPU.\n", c.TooLong)
	}
	fmt.Fprintf(&b, "Mean ± half of the 95 %% interval over seeds. Over %gs also counts requests refused or failed. \"ours less this\" is paired by seed, in percentage points.\n", c.SLO)
	for _, n := range c.RoutersOf() {
		fmt.Fprintf(&b, "\n%s\n", plural(n, "router"))
		fmt.Fprintf(&b, "  %-14s %15s %15s %15s %17s %10s %13s %9s %13s  %s\n",
			"policy", "TTFT p50 ms", "p95 ms", "p99 ms", fmt.Sprintf("over %gs %%", c.SLO), "ITL p99 ms", "preemptions", "lost %", "good req/s", "ours less this")
		for _, r := range c.Rows {
			if r.Routers == n {
				c.writeRow(&b, r)
			}
		}
	}
	b.WriteByte('\n')
	for _, p := range c.Policies {
		fmt.Fprintf(&b, "%-14s %s\n", p.Name, p.About)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

func (c *Comparison) writeRow(b *strings.Builder, r Row) {
	many := len(c.Seeds) > 1
	text := func(e Estimate, factor float64, digits int) string {
		if !many {
			return fmt.Sprintf("%.*f", digits, factor*e.Mean)
		}
		return fmt.Sprintf("%.*f ±%.*f", digits, factor*e.Mean, digits, factor*e.Half)
	}
	fmt.Fprintf(b, "  %-14s %15s %15s %15s %17s %10.0f %13s %9s %13s",
		r.Policy, text(r.P50, 1, 0), text(r.P95, 1, 0), text(r.P99, 1, 0), text(r.Slow, 100, 3), r.ITL99.Mean,
		text(r.Preemptions, 1, 0), fmt.Sprintf("%.2f", 100*r.Lost.Mean), text(r.Goodput, 1, 1))
	if r.OursLess != nil {
		fmt.Fprintf(b, "  %s %s", text(*r.OursLess, 100, 3), r.Verdict)
	}
	b.WriteByte('\n')
}

// WriteCSV writes one line per run.
func (c *Comparison) WriteCSV(w io.Writer) error {
	out := csv.NewWriter(w)
	rows := [][]string{{
		"arrivals", "scenario", "profile", "gpus", "load", "rate_rps", "routers", "policy", "seed", "requests", "answered", "refused", "failed",
		"ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "share_over_slo", "itl_p99_ms", "preemptions", "goodput_rps",
	}}
	number := func(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }
	for _, r := range c.Runs {
		rows = append(rows, []string{
			c.Arrivals, c.Scenario, c.Profile, strconv.Itoa(c.GPUs), number(c.Load), strconv.FormatFloat(c.Rate, 'f', 3, 64),
			strconv.Itoa(r.Routers), r.Policy, strconv.FormatUint(r.Seed, 10), strconv.Itoa(r.Requests), strconv.Itoa(r.Answered),
			strconv.Itoa(r.Refused), strconv.Itoa(r.Failed), number(r.P50), number(r.P95), number(r.P99),
			strconv.FormatFloat(r.Slow, 'f', 6, 64), number(r.ITL99), strconv.Itoa(r.Preemptions), strconv.FormatFloat(r.Goodput, 'f', 3, 64),
		})
	}
	if err := out.WriteAll(rows); err != nil {
		return fmt.Errorf("write CSV: %w", err)
	}
	return nil
}
