package own

import "time"

// sentTicks is how many totals are kept: those at the ends of one second's ticks.
const sentTicks = int(time.Second/Tick) + 1

// Sent keeps, for one endpoint, the total of the prompt tokens sent to it at the
// end of the last ticks; serve counts with it. The zero Sent has seen no tick.
//
// A reading says when its page was read but not which of our requests the engine
// knew by then, and totals are known by tick alone. So what counts as sent since
// a sample begins with the tick before it was read: up to a tick's tokens more
// than [SentExactly] says, and what the reading was under way for.
type Sent struct {
	slot uint32
	ring [sentTicks]struct {
		at    time.Time
		total int64
	}
	n, at int
}

// Tick notes the total at now. A slot that was dealt anew begins again.
func (s *Sent) Tick(now time.Time, slot uint32, total int64) {
	if s.n > 0 && slot != s.slot { // counts of a slot's earlier owner don't matter: only differences do
		*s = Sent{}
	}
	s.slot = slot
	s.ring[s.at].at, s.ring[s.at].total = now, total
	s.at = (s.at + 1) % sentTicks
	s.n = min(s.n+1, sentTicks)
}

// Since is how many tokens were sent after t, to the resolution of a tick: from
// the newest tick that is not after t on. Where t is before all that is kept it
// is what was sent since the oldest.
func (s *Sent) Since(t time.Time) float64 {
	if s.n == 0 {
		return 0
	}
	newest := s.ring[(s.at-1+sentTicks)%sentTicks].total
	from := newest
	for i := range s.n {
		e := s.ring[(s.at-1-i+2*sentTicks)%sentTicks]
		from = e.total
		if !e.at.After(t) {
			break
		}
	}
	return float64(max(0, newest-from))
}

// SentExactly counts the same where it is known after which sample each prompt
// was sent; the simulator counts with it. A prompt counts from the sample's
// arrival on, not from when its page was read. The zero value has sent nothing.
type SentExactly struct {
	recent  [time.Second / Tick]float64 // by tick: the last second
	at      int
	since   float64 // since the newest sample
	samples int     // which that was
}

// Add counts a prompt sent after so many samples had arrived.
func (s *SentExactly) Add(tokens float64, samples int) {
	s.recent[s.at] += tokens
	if samples != s.samples {
		s.samples, s.since = samples, 0
	}
	s.since += tokens
}

// SinceSample is how many tokens were sent since the newest sample, of so many.
func (s *SentExactly) SinceSample(samples int) float64 {
	if samples != s.samples {
		return 0
	}
	return s.since
}

// LastSecond is how many were sent in the ticks of the last second, the present
// one included.
func (s *SentExactly) LastSecond() float64 {
	sum := 0.0
	for _, v := range s.recent {
		sum += v
	}
	return sum
}

// Rotate ends the tick.
func (s *SentExactly) Rotate() {
	s.at = (s.at + 1) % len(s.recent)
	s.recent[s.at] = 0
}
