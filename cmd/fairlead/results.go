package main

import (
	"encoding/csv"
	"errors"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/load"
)

// results writes requests as CSV.
type results struct {
	mu   sync.Mutex
	file *os.File
	csv  *csv.Writer
}

func newResults(path string) (*results, error) {
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	r := &results{file: file, csv: csv.NewWriter(file)}
	return r, r.csv.Write([]string{"at_ms", "target", "server", "stream", "prompt_tokens", "output_tokens", "status", "late_ms", "headers_ms", "first_token_ms", "total_ms", "cut", "error"})
}

func (r *results) add(x load.Result) {
	ms := func(d time.Duration) string { return strconv.FormatFloat(float64(d.Microseconds())/1000, 'f', 1, 64) }
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.csv.Write([]string{ms(x.At), x.Target, x.ServedBy, strconv.FormatBool(x.Stream), strconv.Itoa(x.Prompt), strconv.Itoa(x.Output),
		strconv.Itoa(x.Status), ms(x.Late), ms(x.HeaderTime), ms(x.FirstToken), ms(x.Total), strconv.FormatBool(x.Cut), x.Err}) // kept by Writer.Error
}

func (r *results) close() error {
	r.csv.Flush()
	return errors.Join(r.csv.Error(), r.file.Close())
}
