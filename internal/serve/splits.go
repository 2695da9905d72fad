package serve

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry/scrape"
	"github.com/fairlead-proxy/fairlead/xds/rollout"
)

// splits holds the weights set by hand and their file.
type splits struct {
	mu    sync.Mutex
	store rollout.Store
	state rollout.State
}

// openSplits reads the state folder, which it makes if there is none.
func openSplits(dir string) (*splits, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("serve.stateDir: %w", err)
	}
	s := &splits{store: rollout.NewStore(dir)}
	var err error
	s.state, err = s.store.Load()
	return s, err
}

// effective returns the splits that differ from the file's, and forgets those
// whose split in the file has changed since.
func (s *splits) effective(cfg *fleet.Config) map[string]fleet.Split {
	s.mu.Lock()
	defer s.mu.Unlock()
	out, _, _ := s.state.Apply(cfg)
	return out
}

// keep saves the state without the entries that the config has ended, and
// returns the routes of those.
func (s *splits) keep(cfg *fleet.Config) (ended []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, next, _ := s.state.Apply(cfg)
	if bytes.Equal(next.Encode(), s.state.Encode()) {
		return nil, nil
	}
	for _, route := range s.state.Routes() {
		if _, stays := next.Entry(route); !stays {
			ended = append(ended, route)
		}
	}
	return ended, s.save(next)
}

// save writes the state before it counts: a weight that was published is
// always found again.
func (s *splits) save(next rollout.State) error {
	if err := s.store.Save(next); err != nil {
		return err
	}
	s.state = next
	return nil
}

// SetSplit sets weights of a route by hand, keeps them in the state folder and
// publishes them. Pools left out keep their present weight.
func (s *Server) SetSplit(route string, weights map[string]uint32) error {
	return s.changeSplit(route, func(cfg *fleet.Config, state rollout.State) (rollout.State, error) {
		return state.Set(cfg, route, weights, time.Now())
	})
}

// ClearSplit goes back to the config file's split of a route.
func (s *Server) ClearSplit(route string) error {
	return s.changeSplit(route, func(_ *fleet.Config, state rollout.State) (rollout.State, error) {
		return state.Clear(route), nil
	})
}

func (s *Server) changeSplit(route string, change func(*fleet.Config, rollout.State) (rollout.State, error)) error {
	s.reconfigure.Lock()
	defer s.reconfigure.Unlock()
	cfg := s.config.Load()
	if _, known := cfg.RouteByName(route); !known {
		return fmt.Errorf("%w route %q; accepted: %v", admin.ErrUnknown, route, routeNames(cfg))
	}
	before, err := s.splits.change(cfg, change)
	if err != nil {
		return err
	}
	if err := s.submit(cfg); err != nil {
		return errors.Join(err, s.splits.restore(before))
	}
	for _, split := range s.Splits() {
		if split.Route == route {
			s.log.Info("split changed by hand", "route", route, "by_hand", split.ByHand, "now", shares(split.Effective), "file", shares(split.File))
		}
	}
	return nil
}

// endSplits forgets the weights set by hand that the config has ended, and says
// so.
func (s *Server) endSplits(cfg *fleet.Config) error {
	ended, err := s.splits.keep(cfg)
	for _, route := range ended {
		s.log.Warn("weights set by hand have ended: the config file has another split for the route, or no such route", "route", route)
	}
	return err
}

// shares is a split for a log line: "a=10.00% b=90.00%".
func shares(weights []admin.Weight) string {
	words := make([]string, len(weights))
	for i, w := range weights {
		words[i] = fmt.Sprintf("%s=%.2f%%", w.Pool, float64(w.BasisPoints)/100)
	}
	return strings.Join(words, " ")
}

// change saves the changed state and returns the one before.
func (s *splits) change(cfg *fleet.Config, change func(*fleet.Config, rollout.State) (rollout.State, error)) (before rollout.State, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before = s.state
	next, err := change(cfg, before)
	if err != nil {
		return before, err
	}
	return before, s.save(next)
}

// restore takes a change back.
func (s *splits) restore(before rollout.State) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.save(before)
}

func routeNames(cfg *fleet.Config) []string {
	var names []string
	for _, r := range cfg.Routes {
		names = append(names, r.Name)
	}
	return names
}

// Splits shows every route's split as the file has it and as it is published.
func (s *Server) Splits() []admin.Split {
	cfg := s.config.Load()
	s.splits.mu.Lock()
	effective, _, drift := s.splits.state.Apply(cfg)
	s.splits.mu.Unlock()
	since := map[string]time.Time{}
	for _, d := range drift {
		since[d.Route] = d.Since
	}
	out := make([]admin.Split, 0, len(cfg.Routes))
	for _, r := range cfg.Routes {
		shown := admin.Split{Route: r.Name, File: weights(r.Split), Effective: weights(r.Split)}
		if split, ok := effective[r.Name]; ok {
			shown.Effective, shown.ByHand, shown.Since = weights(split), true, since[r.Name]
		}
		out = append(out, shown)
	}
	return out
}

func weights(split fleet.Split) []admin.Weight {
	points := split.BasisPoints()
	out := make([]admin.Weight, len(split))
	for i, w := range split {
		out[i] = admin.Weight{Pool: w.Pool, Weight: w.Weight, BasisPoints: points[i]}
	}
	return out
}

// reload reads the config file again. A faulty file changes nothing.
func (s *Server) reload() {
	cfg, err := fleet.Load(s.configPath)
	if err == nil && cfg.Digest != s.config.Load().Digest {
		err = s.Reconfigure(cfg)
		if err == nil {
			s.metrics.reloads.add("published", 1)
			s.log.Info("config published", "file", s.configPath)
		}
	} else if err == nil && s.faulty.Load() {
		s.log.Info("config file is good again, and as it was", "file", s.configPath)
	}
	s.faulty.Store(err != nil)
	if err != nil {
		s.metrics.reloads.add("refused", 1)
		s.log.Error("config not taken; the last good one stays in force", "file", s.configPath, "error", err)
	}
}

// errRestart refuses changes that only a new process can take.
var errRestart = errors.New("changes under serve: take effect only after a restart")

// Reconfigure publishes a new configuration and lets the scoring follow it. On
// an error nothing has changed.
func (s *Server) Reconfigure(cfg *fleet.Config) error {
	s.reconfigure.Lock()
	defer s.reconfigure.Unlock()
	if keys := s.config.Load().Serve.Changes(&cfg.Serve); len(keys) > 0 {
		return fmt.Errorf("%s: %w", strings.Join(keys, ", "), errRestart)
	}
	if err := s.submit(cfg); err != nil {
		return err
	}
	s.config.Store(cfg)
	s.scraper.SetTargets(scrape.Targets(cfg.Pools))
	s.push.SetPools(cfg.Pools)
	if err := s.endSplits(cfg); err != nil {
		// The config is published all the same. What could not be written is
		// only that some weights set by hand have ended, and a restart finds
		// that out again by itself.
		s.log.Error("state folder not written", "error", err)
	}
	return nil
}
