package scorer

import (
	"cmp"
	"slices"
	"time"
)

// gate decides which of the endpoints that risk or a fault wants out really go.
//
// A hard fault goes first and is bounded by half the pool. Risk is bounded by
// 30 % of the pool, and by half together with the faults; one endpoint always
// may go, the last never. While the pool as a whole is loaded risk ejects
// nothing, and what it had ejected comes back at its soft weight: load that is
// everywhere is shed, not moved.
func (j *Judge) gate(now time.Time, p *pool, maxInFlight int, members []*endpoint) {
	n := len(members)
	faultRoom := min(n-1, atLeastOne(hardShare, n))
	riskRoom := atLeastOne(riskShare, n)

	j.wanted = j.wanted[:0]
	for _, e := range members {
		if e.out() {
			j.wanted = append(j.wanted, e)
		}
	}
	p.loaded = isLoaded(p.loaded, maxInFlight, members)
	slices.SortStableFunc(j.wanted, moreUrgent)
	for _, e := range j.wanted {
		was := e.ejected
		e.ejected = faultRoom > 0 && (e.fault != 0 || riskRoom > 0 && !p.loaded)
		if !e.ejected {
			continue
		}
		if !was {
			e.ejectedAt = now
		}
		faultRoom--
		if e.fault == 0 {
			riskRoom--
		}
	}
}

func atLeastOne(share float64, n int) int { return max(1, int(share*float64(n))) }

// moreUrgent orders faults before risks, then those that are out already, so
// that places don't change hands from tick to tick, then by risk.
func moreUrgent(a, b *endpoint) int {
	if c := compareBool(a.fault != 0, b.fault != 0); c != 0 {
		return c
	}
	if c := compareBool(a.ejected, b.ejected); c != 0 {
		return c
	}
	return cmp.Compare(b.smoothed, a.smoothed)
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// isLoaded reports whether the pool as a whole is loaded, with hysteresis: the
// mean risk of the endpoints that serve, or the in-flight attempts as a share
// of what the endpoints that would stay can take. A single candidate is left
// out of the mean: in a pool of two its own risk would otherwise keep it in.
func isLoaded(before bool, maxInFlight int, members []*endpoint) bool {
	riskLimit, shareLimit := loadedRisk, loadedInFlight
	if before {
		riskLimit, shareLimit = relievedRisk, relievedInFlight
	}
	candidates := 0
	for _, e := range members {
		if e.riskOut && !e.ejected {
			candidates++
		}
	}
	var risk, judged, inFlight, room float64
	for _, e := range members {
		inFlight += float64(max(0, e.view.Own.InFlight))
		if !e.out() {
			room += float64(maxInFlight)
		}
		lone := e.riskOut && candidates == 1
		if e.stale() || e.ejected || e.fault != 0 || lone {
			continue
		}
		risk += e.risk
		judged++
	}
	if judged > 0 && risk/judged >= riskLimit {
		return true
	}
	return maxInFlight > 0 && inFlight > 0 && inFlight >= shareLimit*room
}
