// Package rollout decides the split of each route: the file's own, or weights
// that were set by hand.
//
// It owns the record of such weights ([State]) and the rule when one ends: as
// soon as the file's own split of that route is another than the one they were
// set against. It is pure but for [Store]; it never talks to an Envoy.
//
// Invariants: a State is immutable; an effective split has exactly the pools of
// the file's split in the same order, since the order is part of the draw.
package rollout

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// version of the encoding. A later version that can't be read by this code
// must have another number.
const version = 1

// Entry is one route's weights set by hand.
type Entry struct {
	// Split is the effective split.
	Split fleet.Split
	// FileDigest identifies the file's split they were set against.
	FileDigest string
	Since      time.Time
	By         string // who set them, free text; may be ""
}

// State is all weights set by hand, by route. The zero State has none.
type State struct {
	entries map[string]Entry
}

// Drift is a route whose effective split is not the file's.
type Drift struct {
	Route     string
	File      fleet.Split
	Effective fleet.Split
	Since     time.Time
	By        string
}

// Routes returns the routes that have weights set by hand, sorted.
func (s State) Routes() []string { return slices.Sorted(maps.Keys(s.entries)) }

// Entry returns a route's weights set by hand, or false.
func (s State) Entry(route string) (Entry, bool) {
	e, ok := s.entries[route]
	e.Split = slices.Clone(e.Split)
	return e, ok
}

// Set returns a state in which the named pools of the route's split have new
// weights, and the others keep what they have now. weights may hold any
// numbers; they are published as shares of their sum. It is an error when the
// route or a pool isn't there, when no pool is named, when all weights of the
// split would be 0, or when a weight above 0 would be published as 0.
func (s State) Set(cfg *fleet.Config, route string, weights map[string]uint32, now time.Time) (State, error) {
	r, ok := cfg.RouteByName(route)
	if !ok {
		return s, fmt.Errorf("route %q is not in the configuration; accepted: %s", route, strings.Join(routeNames(cfg), ", "))
	}
	if len(weights) == 0 {
		return s, fmt.Errorf("route %q: no pool is named; accepted: POOL=WEIGHT with pools %s", route, strings.Join(poolNames(r.Split), ", "))
	}
	digest := splitDigest(r.Split)
	split := slices.Clone(r.Split)
	if e, ok := s.entries[route]; ok && e.FileDigest == digest {
		split = slices.Clone(e.Split)
	}
	if err := setWeights(split, weights); err != nil {
		return s, fmt.Errorf("route %q: %w", route, err)
	}
	next := s.clone()
	next.entries[route] = Entry{Split: split, FileDigest: digest, Since: now.UTC()}
	return next, nil
}

func setWeights(split fleet.Split, weights map[string]uint32) error {
	unknown := maps.Clone(weights)
	sum := uint64(0)
	for i, arm := range split {
		if w, ok := weights[arm.Pool]; ok {
			split[i].Weight = w
			delete(unknown, arm.Pool)
		}
		sum += uint64(split[i].Weight)
	}
	if len(unknown) > 0 {
		return fmt.Errorf("pools %s are not in its split; accepted: %s",
			strings.Join(slices.Sorted(maps.Keys(unknown)), ", "), strings.Join(poolNames(split), ", "))
	}
	if sum == 0 {
		return fmt.Errorf("all weights would be 0 (%s); at least one must be above 0", split)
	}
	for i, points := range split.BasisPoints() {
		if w := split[i].Weight; w > 0 && points == 0 {
			// As in the file: it would be published as 0.
			return fmt.Errorf("pool %q: found %d, too little of the split for one basis point; accepted: 0, or a larger share", split[i].Pool, w)
		}
	}
	return nil
}

// SetBy records who set a route's weights.
func (s State) SetBy(route, who string) State {
	e, ok := s.entries[route]
	if !ok {
		return s
	}
	next := s.clone()
	e.By = who
	next.entries[route] = e
	return next
}

// Clear returns a state without weights for the route, so that the file's split
// counts again.
func (s State) Clear(route string) State {
	next := s.clone()
	delete(next.entries, route)
	return next
}

// Apply returns the splits that differ from the file's by hand, the state
// without the entries that have ended, and the drift, sorted by route. An
// entry ends when its route is gone or the file's split of it changed.
func (s State) Apply(cfg *fleet.Config) (splits map[string]fleet.Split, next State, drift []Drift) {
	next = s.clone()
	splits = map[string]fleet.Split{}
	for _, route := range slices.Sorted(maps.Keys(s.entries)) {
		e := s.entries[route]
		r, ok := cfg.RouteByName(route)
		if !ok || splitDigest(r.Split) != e.FileDigest {
			delete(next.entries, route)
			continue
		}
		splits[route] = slices.Clone(e.Split)
		if !slices.Equal(r.Split, e.Split) {
			drift = append(drift, Drift{Route: route, File: slices.Clone(r.Split), Effective: slices.Clone(e.Split), Since: e.Since, By: e.By})
		}
	}
	return splits, next, drift
}

func (s State) clone() State {
	m := maps.Clone(s.entries)
	if m == nil {
		m = map[string]Entry{}
	}
	return State{entries: m}
}

// splitDigest identifies a split: pools, order and weights.
func splitDigest(s fleet.Split) string {
	h := sha256.New()
	for _, arm := range s {
		fmt.Fprintf(h, "%q=%d\n", arm.Pool, arm.Weight)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

func routeNames(cfg *fleet.Config) []string {
	names := make([]string, 0, len(cfg.Routes))
	for _, r := range cfg.Routes {
		names = append(names, r.Name)
	}
	return names
}

func poolNames(s fleet.Split) []string {
	names := make([]string, 0, len(s))
	for _, arm := range s {
		names = append(names, arm.Pool)
	}
	return names
}

// The encoding. Fields are spelled out so that a renamed Go field can't change
// the file.
type fileState struct {
	Version int                  `json:"version"`
	Routes  map[string]fileEntry `json:"routes"`
}

type fileEntry struct {
	Weights    []fileWeight `json:"weights"`
	FileDigest string       `json:"fileDigest"`
	Since      time.Time    `json:"since"`
	By         string       `json:"by,omitempty"`
}

type fileWeight struct {
	Pool   string `json:"pool"`
	Weight uint32 `json:"weight"`
}

// Encode returns the state as JSON. Equal states give equal bytes.
func (s State) Encode() []byte {
	f := fileState{Version: version, Routes: map[string]fileEntry{}}
	for route, e := range s.entries {
		fe := fileEntry{FileDigest: e.FileDigest, Since: e.Since, By: e.By, Weights: []fileWeight{}}
		for _, arm := range e.Split {
			fe.Weights = append(fe.Weights, fileWeight(arm))
		}
		f.Routes[route] = fe
	}
	out, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		panic(err) // strings, numbers and times always marshal
	}
	return append(out, '\n')
}

// Decode reads what [State.Encode] wrote. Anything else is an error.
func Decode(raw []byte) (State, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	var f fileState
	if err := dec.Decode(&f); err != nil {
		return State{}, fmt.Errorf("decode weights set by hand: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return State{}, errors.New("decode weights set by hand: there is more behind the end")
	}
	if f.Version != version {
		return State{}, fmt.Errorf("decode weights set by hand: version %d; accepted: %d", f.Version, version)
	}
	s := State{}.clone()
	for route, fe := range f.Routes {
		e, err := fe.entry()
		if err != nil {
			return State{}, fmt.Errorf("decode weights set by hand: route %q: %w", route, err)
		}
		s.entries[route] = e
	}
	return s, nil
}

func (fe fileEntry) entry() (Entry, error) {
	e := Entry{FileDigest: fe.FileDigest, Since: fe.Since, By: fe.By}
	seen := map[string]bool{}
	for _, w := range fe.Weights {
		if w.Pool == "" || seen[w.Pool] {
			return Entry{}, fmt.Errorf("pool %q is empty or there twice", w.Pool)
		}
		seen[w.Pool] = true
		e.Split = append(e.Split, fleet.SplitWeight(w))
	}
	if e.Split.BasisPoints() == nil {
		return Entry{}, errors.New("no weight is above 0")
	}
	if e.FileDigest == "" {
		return Entry{}, errors.New("fileDigest is empty")
	}
	return e, nil
}
