package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
)

// maxBody bounds a request's body; a split is a few hundred bytes.
const maxBody = 64 << 10

// Options are the read-only views and the one change that the API offers.
type Options struct {
	// Listen is the address the handler is served on; its host names the only
	// Host values that are let in beside localhost.
	Listen  string
	Metrics http.Handler
	// Ready returns nil when the process may get traffic, else why not.
	Ready   func() error
	Proxies func() []Proxy
	Fleet   func() Fleet
	// Clients are those that have most of each pool.
	Clients func() []Caller
	Splits  func() []Split
	// SetSplit sets weights by hand; ClearSplit goes back to the file's. An
	// error that wraps ErrUnknown becomes 404, any other 400.
	SetSplit   func(route string, weights map[string]uint32) error
	ClearSplit func(route string) error
}

// ErrUnknown marks a route that does not exist.
var ErrUnknown = errors.New("unknown")

// Handler returns the HTTP handler.
func Handler(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { text(w, http.StatusOK, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := o.Ready(); err != nil {
			text(w, http.StatusServiceUnavailable, err.Error()+"\n")
			return
		}
		text(w, http.StatusOK, "ready\n")
	})
	mux.Handle("GET /metrics", o.Metrics)
	mux.HandleFunc("GET /api/v1/proxies", func(w http.ResponseWriter, _ *http.Request) { answer(w, o.Proxies()) })
	mux.HandleFunc("GET /api/v1/fleet", func(w http.ResponseWriter, _ *http.Request) { answer(w, o.Fleet()) })
	mux.HandleFunc("GET /api/v1/clients", func(w http.ResponseWriter, _ *http.Request) { answer(w, o.Clients()) })
	mux.HandleFunc("GET /api/v1/splits", func(w http.ResponseWriter, _ *http.Request) { answer(w, o.Splits()) })
	mux.HandleFunc("PUT /api/v1/splits/{route}", func(w http.ResponseWriter, r *http.Request) {
		body, err := readJSON[SetSplit](r)
		if err != nil {
			problem(w, http.StatusBadRequest, err)
			return
		}
		change(w, o, o.SetSplit(r.PathValue("route"), body.Weights))
	})
	mux.HandleFunc("DELETE /api/v1/splits/{route}", func(w http.ResponseWriter, r *http.Request) {
		change(w, o, o.ClearSplit(r.PathValue("route")))
	})
	return guardHost(o.Listen, mux)
}

func change(w http.ResponseWriter, o Options, err error) {
	switch {
	case errors.Is(err, ErrUnknown):
		problem(w, http.StatusNotFound, err)
	case err != nil:
		problem(w, http.StatusBadRequest, err)
	default:
		answer(w, o.Splits())
	}
}

// guardHost lets a request in only if its Host is localhost or the very
// address that is listened on. Beyond loopback, which the config must ask for,
// callers use names that are not known here, and any Host will do.
func guardHost(listen string, next http.Handler) http.Handler {
	own, _, err := net.SplitHostPort(listen)
	if err != nil {
		own = listen
	}
	if ip := net.ParseIP(own); ip != nil && !ip.IsLoopback() {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = r.Host
		}
		ip := net.ParseIP(host)
		if host == own || host == "localhost" || ip.IsLoopback() {
			next.ServeHTTP(w, r)
			return
		}
		problem(w, http.StatusForbidden, fmt.Errorf("host %q is not this server's; accepted: localhost or %s", r.Host, listen))
	})
}

func readJSON[T any](r *http.Request) (T, error) {
	var v T
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return v, fmt.Errorf("content type %q; accepted: application/json", r.Header.Get("Content-Type"))
	}
	decoder := json.NewDecoder(io.LimitReader(r.Body, maxBody))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&v); err != nil {
		return v, fmt.Errorf("read body: %w", err)
	}
	return v, nil
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(v) // the caller went away
}

func problem(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(Problem{Error: err.Error()}) // the caller went away
}

func text(w http.ResponseWriter, status int, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, s) // the caller went away
}
