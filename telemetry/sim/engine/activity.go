package engine

import "time"

// Window is over what a GPU's utilisations are averaged; NVML's own sampling
// window is 1/6 s to 1 s.
const Window = time.Second

// minSpan is the shortest span kept apart, so that the ring covers the window.
const minSpan = 5 * time.Millisecond

// Activity remembers when a GPU was busy, for what its counters show. The zero
// Activity was never busy and began at 0.
type Activity struct {
	ring [int(Window/minSpan) + 56]span
	n    int // spans ever begun

	decode, prefill time.Duration // since it began
}

// span is a stretch of time with some work in it, taken as even.
type span struct {
	from, to        time.Duration
	decode, prefill time.Duration
}

// Load is the share of the window spent on each kind of work, 0…1.
type Load struct{ Decode, Prefill float64 }

// Busy is the share of the window with any work: GPU_UTIL and
// GR_ENGINE_ACTIVE.
func (l Load) Busy() float64 { return l.Decode + l.Prefill }

// DRAMActive and TensorActive are of plausible shape and not calibrated:
// decoding is bound by memory, prefill by arithmetic (Splitwise, arXiv
// 2311.18677).
func (l Load) DRAMActive() float64 { return 0.8*l.Decode + 0.3*l.Prefill }

// TensorActive is the tensor pipes' share; see DRAMActive.
func (l Load) TensorActive() float64 { return 0.1*l.Decode + 0.7*l.Prefill }

// Watts is the shape of a GPU's power over its work and not calibrated: prefill
// draws close to the limit, decoding waits for memory and draws less (Splitwise,
// arXiv 2311.18677).
func (l Load) Watts(p Profile) float64 {
	return p.IdleWatts + (p.PeakWatts-p.IdleWatts)*(0.6*l.Decode+0.95*l.Prefill)
}

// Add records a step from a moment on.
func (a *Activity) Add(from time.Duration, s Step) {
	prefill := s.Prefill()
	a.decode += s.Decode
	a.prefill += prefill
	to := from + s.Duration
	if a.n > 0 {
		if last := &a.ring[(a.n-1)%len(a.ring)]; to-last.from < minSpan {
			last.to = to
			last.decode += s.Decode
			last.prefill += prefill
			return
		}
	}
	a.ring[a.n%len(a.ring)] = span{from, to, s.Decode, prefill}
	a.n++
}

// At is the load over the window that ends now.
func (a *Activity) At(now time.Duration) Load {
	var l Load
	begin := now - Window
	for i := a.n - 1; i >= max(0, a.n-len(a.ring)); i-- {
		s := &a.ring[i%len(a.ring)]
		if s.to <= begin {
			break // spans are in order of time
		}
		if inside := min(s.to, now) - max(s.from, begin); inside > 0 {
			share := float64(inside) / float64(s.to-s.from) / float64(Window)
			l.Decode += share * float64(s.decode)
			l.Prefill += share * float64(s.prefill)
		}
	}
	if b := l.Busy(); b > 1 {
		l.Decode /= b
		l.Prefill /= b
	}
	return l
}

// Joules is the energy from 0 to now.
func (a *Activity) Joules(p Profile, now time.Duration) float64 {
	work := (p.PeakWatts - p.IdleWatts) * (0.6*a.decode.Seconds() + 0.95*a.prefill.Seconds())
	return p.IdleWatts*now.Seconds() + work
}
