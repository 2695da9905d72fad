package sim

import "time"

// window is over what the GPU page's utilisations are averaged; NVML's own
// sampling window is 1/6 s to 1 s.
const window = time.Second

// minSpan is the shortest span kept apart, so that the ring covers the window.
const minSpan = 5 * time.Millisecond

// activity remembers when the GPU was busy, for the GPU page.
type activity struct {
	start time.Time
	ring  [int(window/minSpan) + 56]span
	n     int // spans ever begun

	decode, prefill time.Duration // since start
}

// span is a stretch of time with some work in it, taken as even.
type span struct {
	from, to        time.Time
	decode, prefill time.Duration
}

// load is the share of the window spent on each kind of work, 0…1.
type load struct{ decode, prefill float64 }

func (l load) busy() float64 { return l.decode + l.prefill }

// power is the shape of a GPU's power over its work and not calibrated: prefill
// is bound by arithmetic and draws close to the limit, decoding waits for memory
// and draws less (Splitwise, arXiv 2311.18677).
func (l load) power(p Profile) float64 {
	return p.IdleWatts + (p.PeakWatts-p.IdleWatts)*(0.6*l.decode+0.95*l.prefill)
}

// add records a step from a moment on.
func (a *activity) add(from time.Time, s step) {
	prefill := s.duration - s.decode
	a.decode += s.decode
	a.prefill += prefill
	to := from.Add(s.duration)
	if a.n > 0 {
		if last := &a.ring[(a.n-1)%len(a.ring)]; to.Sub(last.from) < minSpan {
			last.to = to
			last.decode += s.decode
			last.prefill += prefill
			return
		}
	}
	a.ring[a.n%len(a.ring)] = span{from, to, s.decode, prefill}
	a.n++
}

// at is the load over the window that ends now.
func (a *activity) at(now time.Time) load {
	var l load
	begin := now.Add(-window)
	for i := max(0, a.n-len(a.ring)); i < a.n; i++ {
		s := &a.ring[i%len(a.ring)]
		from, to := s.from, s.to
		if from.Before(begin) {
			from = begin
		}
		if to.After(now) {
			to = now
		}
		if inside := to.Sub(from); inside > 0 {
			share := float64(inside) / float64(s.to.Sub(s.from)) / float64(window)
			l.decode += share * float64(s.decode)
			l.prefill += share * float64(s.prefill)
		}
	}
	if b := l.busy(); b > 1 {
		l.decode /= b
		l.prefill /= b
	}
	return l
}

// energyMJ is the energy since start in millijoules, as DCGM counts it.
func (a *activity) energyMJ(p Profile, now time.Time) uint64 {
	work := (p.PeakWatts - p.IdleWatts) * (0.6*a.decode.Seconds() + 0.95*a.prefill.Seconds())
	return uint64(1000 * (p.IdleWatts*now.Sub(a.start).Seconds() + work))
}
