package dcgm

import (
	"sync"
	"time"
)

// Cause is why a read failed.
type Cause string

// Causes of failed reads.
const (
	CauseConnect       Cause = "connect"        // no connection could be made
	CauseConnection    Cause = "connection"     // the connection is gone
	CauseTimeout       Cause = "timeout"        // DCGM's own time limit
	CauseDriverTimeout Cause = "driver timeout" // the driver does not answer the host engine
	CausePaused        Cause = "paused"
	CauseDetached      Cause = "detached" // the GPUs were detached, as for a driver upgrade
	CauseNoGPU         Cause = "no gpu"   // there is none, or none that tells its UUID
	CauseOther         Cause = "other"
)

// Stats counts since the source was made.
type Stats struct {
	Epoch uint32 // 0 before the first connection
	GPUs  int    // GPUs and MIG instances in the last frame
	Reads uint64 // reads that DCGM answered, slow ones included
	// Late counts reads that took longer than the deadline.
	Late uint64
	// Failed counts reads that DCGM did not answer, by cause.
	Failed map[Cause]uint64
	// Connects counts the connections made; each after the first is a new one to
	// the host engine after a loss.
	Connects uint64
	// Reconfigurations counts changes of the GPUs or MIG instances there are.
	Reconfigurations uint64
	// Rewatches counts watches made anew because values had turned blank.
	Rewatches uint64
	// Blank, OutOfRange and NoData count samples that gave no number; Stale
	// counts, per read, numbers that were too old to be known.
	Blank, OutOfRange, NoData, Stale uint64
	// Frozen counts, per read, GPUs whose energy counter stood while they drew
	// power.
	Frozen uint64
	// XIDs counts XID events.
	XIDs uint64
	// Skew is the host engine's clock minus this machine's, by the newest stamp;
	// Skewed says that it is more than a second. ClockSteps counts how often that
	// clock went backward.
	Skew       time.Duration
	Skewed     bool
	ClockSteps uint64
	// Unsupported are the fields that DCGM refused to watch on this connection.
	Unsupported []int
}

// counters guards a Stats.
type counters struct {
	mu    sync.Mutex
	stats Stats
}

func (c *counters) count(change func(*Stats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.stats)
}

func (c *counters) failed(cause Cause) {
	c.count(func(s *Stats) {
		if s.Failed == nil {
			s.Failed = make(map[Cause]uint64)
		}
		s.Failed[cause]++
	})
}

func (c *counters) skew() (time.Duration, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats.Skew, c.stats.Skewed
}

func (c *counters) snapshot() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Failed = make(map[Cause]uint64, len(c.stats.Failed))
	for cause, n := range c.stats.Failed {
		s.Failed[cause] = n
	}
	s.Unsupported = append([]int(nil), s.Unsupported...)
	return s
}
