package load

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"strconv"
	"time"
)

// Arrival is one request before it is sent.
type Arrival struct {
	// Index counts from 0; it also chooses the target.
	Index int
	// At is when the request is due, from the start of the load.
	At time.Duration
	// Prompt and Output are lengths in tokens; exactly Output are asked for.
	Prompt, Output int
	Stream         bool
	// Session, if not empty, is sent as session affinity.
	Session string
}

// Process is how arrivals are spread over time.
type Process uint8

// Processes.
const (
	Constant Process = iota + 1 // equal gaps
	Poisson                     // exponentially distributed gaps, as independent callers make them
)

// Schedule returns the arrivals of a load of rps requests per second over d; a
// share streamShare of them, 0 … 1, streams. The same arguments always give the
// same arrivals, and lengths and streaming depend only on the seed and the
// index, not on rate or process.
func Schedule(seed uint64, rps float64, d time.Duration, process Process, lengths Lengths, streamShare float64) []Arrival {
	var out []Arrival
	for a := range Sequence(seed, rps, process, lengths, streamShare) {
		if a.At >= d {
			break
		}
		out = append(out, a)
	}
	return out
}

// Sequence is Schedule without an end and without a list in memory. It is empty
// when rps is not above 0.
func Sequence(seed uint64, rps float64, process Process, lengths Lengths, streamShare float64) iter.Seq[Arrival] {
	return func(yield func(Arrival) bool) {
		if !(rps > 0) {
			return
		}
		gaps := rand.New(rand.NewPCG(seed, 0x67617073))
		at := 0.0 // seconds
		for i := 0; ; i++ {
			if process == Poisson {
				at += gaps.ExpFloat64() / rps
			} else {
				at = float64(i) / rps
			}
			if at > maxSeconds {
				return
			}
			own := rand.New(rand.NewPCG(seed, uint64(i)))
			a := Arrival{Index: i, At: time.Duration(at * float64(time.Second))}
			a.Prompt, a.Output = lengths.Draw(own.Uint64())
			a.Stream = own.Float64() < streamShare
			if !yield(a) {
				return
			}
		}
	}
}

// maxSeconds keeps arrival times inside a time.Duration: 100 years.
const maxSeconds = 100 * 365 * 24 * 3600

// ReadAzureTrace reads a trace of the Azure LLM inference data set 2023: CSV
// with the columns TIMESTAMP, ContextTokens and GeneratedTokens. Times count
// from the first request; streaming is not in the trace and left false.
func ReadAzureTrace(r io.Reader) ([]Arrival, error) {
	rows := csv.NewReader(r)
	rows.FieldsPerRecord = 3
	rows.ReuseRecord = true
	head, err := rows.Read()
	if err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	if head[0] != "TIMESTAMP" || head[1] != "ContextTokens" || head[2] != "GeneratedTokens" {
		return nil, fmt.Errorf("read trace: found columns %q; accepted: TIMESTAMP, ContextTokens, GeneratedTokens", head)
	}
	var out []Arrival
	var first time.Time
	for {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read trace: %w", err)
		}
		line, _ := rows.FieldPos(0)
		at, err1 := time.Parse("2006-01-02 15:04:05.9999999", row[0])
		prompt, err2 := strconv.Atoi(row[1])
		output, err3 := strconv.Atoi(row[2])
		if err := errors.Join(err1, err2, err3); err != nil {
			return nil, fmt.Errorf("read trace: line %d: %w", line, err)
		}
		if len(out) == 0 {
			first = at
		}
		out = append(out, Arrival{Index: len(out), At: at.Sub(first), Prompt: prompt, Output: output})
	}
}
