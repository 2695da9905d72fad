// Package scrape owns telemetry by polling: the pages of model servers and GPU
// exporters in the Prometheus text format, read into [telemetry.Sample]s.
//
// It decides nothing about an endpoint: a page that cannot be fetched is a
// reading with an error, a number that cannot be right is an unknown field.
//
// Invariants: at most two goroutines per target (one per page) and one request
// in flight per page; a page never holds more memory than Options.MaxBody; all
// goroutines end before Run returns; after a target was removed, or Run
// returned, no reading of it is delivered. Reading a page allocates nothing.
package scrape
