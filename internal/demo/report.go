package demo

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
)

// Row is one line of the live summary: a pool, or an endpoint of it.
type Row struct {
	Pool     string `json:"pool"`
	Endpoint string `json:"endpoint,omitempty"` // "" for the pool's own line
	// Risk is 0 … 1, or null before the first score. A pool shows its mean.
	Risk  *float64 `json:"risk"`
	State string   `json:"state,omitempty"`
	// Weight is the part of the pool's new requests, 0 … 1; for a pool, its
	// part of the route's.
	Weight   float64 `json:"weight"`
	InFlight int     `json:"in_flight"`
	// RPS counts answers that ended in this second.
	RPS float64 `json:"rps"`
	// Times to first token of streams, as their callers saw them, in
	// milliseconds; null when no stream ended in this second.
	P50 *float64 `json:"ttft_p50_ms"`
	P99 *float64 `json:"ttft_p99_ms"`

	Errors    int `json:"errors"`
	Throttled int `json:"throttled"`
	// What Envoy logged of the endpoint's attempts in the last 5 s: the mean
	// time to response headers in milliseconds (null when none came; servers
	// send them long before the first token), and how many failed.
	Headers      *float64 `json:"headers_ms"`
	FailedLogged int      `json:"failed_attempts_5s"`
}

// Second is what the demo shows once a second.
type Second struct {
	Kind     string  `json:"kind"` // "second"
	Elapsed  float64 `json:"elapsed_s"`
	Strategy string  `json:"strategy"`
	// Scorer is the risk model in force; Model the first digits of a trained
	// model's SHA-256.
	Scorer   string `json:"scorer"`
	Model    string `json:"model,omitempty"`
	Sidecars int    `json:"sidecars"`
	// Unserved counts answers that came from no server: refusals and errors of
	// Envoy's or Fairlead's own, and requests that a sidecar took along.
	Unserved int      `json:"unserved"`
	Rows     []Row    `json:"rows"`
	Notes    []string `json:"notes,omitempty"`
}

// secondOf joins the fleet's state with the answers of the last second.
func secondOf(f admin.Fleet, split map[string]float64, answers map[string]*bucket, took time.Duration) Second {
	s := Second{Kind: "second", Scorer: f.Scorer, Model: f.Model}
	for _, p := range f.Pools {
		pool := Row{Pool: p.Name, Weight: split[p.Name]}
		var all bucket
		var risks []float64
		rows := make([]Row, 0, len(p.Endpoints))
		for _, e := range p.Endpoints {
			b := answers[e.Name]
			if b == nil {
				b = &bucket{}
			}
			row := rowOf(*b, took)
			row.Pool, row.Endpoint, row.State, row.Weight, row.InFlight = p.Name, e.Name, e.State, e.Share, int(e.InFlight)
			row.FailedLogged = e.Errors5s
			pool.FailedLogged += e.Errors5s
			if e.HeaderMillis >= 0 {
				row.Headers = &e.HeaderMillis
			}
			if e.Known {
				row.Risk = &e.Risk
				risks = append(risks, e.Risk)
			}
			pool.InFlight += row.InFlight
			all.done += b.done
			all.errors += b.errors
			all.throttled += b.throttled
			all.firstToken = append(all.firstToken, b.firstToken...)
			rows = append(rows, row)
		}
		sum := rowOf(all, took)
		pool.RPS, pool.P50, pool.P99, pool.Errors, pool.Throttled = sum.RPS, sum.P50, sum.P99, sum.Errors, sum.Throttled
		pool.Risk = mean(risks)
		s.Rows = append(s.Rows, pool)
		s.Rows = append(s.Rows, rows...)
	}
	if b := answers[""]; b != nil {
		s.Unserved = b.done
	}
	return s
}

func rowOf(b bucket, took time.Duration) Row {
	r := Row{RPS: float64(b.done) / took.Seconds(), Errors: b.errors, Throttled: b.throttled}
	if len(b.firstToken) > 0 {
		p50, p99 := milliseconds(quantile(b.firstToken, 0.50)), milliseconds(quantile(b.firstToken, 0.99))
		r.P50, r.P99 = &p50, &p99
	}
	return r
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func mean(xs []float64) *float64 {
	if len(xs) == 0 {
		return nil
	}
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	sum /= float64(len(xs))
	return &sum
}

// Reporter shows a demo's progress.
type Reporter interface {
	Note(text string)
	Second(Second)
	Summary(Summary)
}

// lines prints plain text; on a terminal it redraws in place.
type lines struct {
	w       io.Writer
	redraw  bool
	printed int // lines of the last table, to be overwritten
}

func (l *lines) Note(text string) {
	l.printed = 0
	fmt.Fprintln(l.w, text)
}

const rowFormat = "%-8s %-10s %5s  %-9s %6s %8s %6s %9s %9s %8s %6s %5s\n"

func (l *lines) Second(s Second) {
	var out strings.Builder
	if l.redraw && l.printed > 0 {
		fmt.Fprintf(&out, "\x1b[%dA\x1b[J", l.printed)
	}
	scorer := s.Scorer
	if s.Model != "" {
		scorer += "/" + s.Model
	}
	fmt.Fprintf(&out, "t=%3.0fs strategy=%s scorer=%s sidecars=%d unserved=%d\n", s.Elapsed, s.Strategy, scorer, s.Sidecars, s.Unserved)
	fmt.Fprintf(&out, rowFormat, "POOL", "ENDPOINT", "RISK", "STATE", "WEIGHT", "INFLIGHT", "REQ/S", "TTFT p50", "p99", "HEADERS", "ERRORS", "429")
	for _, r := range s.Rows {
		fmt.Fprintf(&out, rowFormat, r.Pool, dash(r.Endpoint), number(r.Risk, "%.2f"), dash(r.State), fmt.Sprintf("%.0f %%", 100*r.Weight),
			fmt.Sprint(r.InFlight), fmt.Sprintf("%.0f", r.RPS), number(r.P50, "%.0f ms"), number(r.P99, "%.0f ms"), number(r.Headers, "%.0f ms"), fmt.Sprint(r.Errors), fmt.Sprint(r.Throttled))
	}
	for _, note := range s.Notes {
		fmt.Fprintf(&out, "%s\n", note)
	}
	text := out.String()
	fmt.Fprint(l.w, text)
	l.printed = 2 + len(s.Rows) + len(s.Notes)
}

func (l *lines) Summary(s Summary) {
	fmt.Fprintf(l.w, "\n%s, %d sidecars, %.0f s at %.0f requests/s: %d answers, %d errors, %d refused (429), %d cut off at the end\n",
		s.Strategy, s.Sidecars, s.Seconds, s.RPS, s.Answers, s.Errors, s.Throttled, s.Unfinished)
	fmt.Fprintf(l.w, "time to first token: p50 %.0f ms, p95 %.0f ms, p99 %.0f ms; over 2 s: %.2f %%\n", s.P50, s.P95, s.P99, 100*s.SlowShare)
	for _, u := range s.Utilisation {
		fmt.Fprintf(l.w, "GPU utilisation of %s: %.0f %%\n", u.Pool, 100*u.Busy)
	}
	for _, c := range s.CPU {
		fmt.Fprintf(l.w, "CPU of %s: %.2f cores\n", c.Process, c.Cores)
	}
	fmt.Fprintf(l.w, "machine: %d cores, %.0f %% idle\n", s.Cores, 100*s.Idle)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func number(x *float64, format string) string {
	if x == nil {
		return "-"
	}
	return fmt.Sprintf(format, *x)
}

// objects prints one JSON object per line: one a second, then the summary. Notes
// are for people and go elsewhere.
type objects struct {
	encoder *json.Encoder
	notes   io.Writer
}

func (o objects) Note(text string) { fmt.Fprintln(o.notes, text) }

func (o objects) Second(s Second) { _ = o.encoder.Encode(s) }

func (o objects) Summary(s Summary) { _ = o.encoder.Encode(s) }

// NewReporter reports to w as "text" (redrawn in place on a terminal) or "json";
// beside JSON, notes go to errs.
func NewReporter(w, errs io.Writer, format string, terminal bool) (Reporter, error) {
	switch format {
	case "text":
		return &lines{w: w, redraw: terminal}, nil
	case "json":
		return objects{json.NewEncoder(w), errs}, nil
	}
	return nil, fmt.Errorf("output format %q; accepted: text, json", format)
}
