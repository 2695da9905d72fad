package dcgm

// xidLedger remembers the XIDs of one GPU. An XID is an event: DCGM keeps the
// last codes with their stamps and never clears them, so only a stamp that was
// not there before is news.
type xidLedger struct {
	begun  bool // the events from before the source are known
	latest int64
	code   int
	events float64
	// seen are the stamps at the last look: what DCGM kept, some sixteen.
	seen map[int64]bool
}

// maxXIDsKept bounds what is remembered when another client makes DCGM keep
// more; the oldest are forgotten.
const maxXIDsKept = 256

// due reports whether the newest sample of the field, as a read showed it, asks
// for a look at all of them.
func (l *xidLedger) due(stamp int64) bool { return !l.begun || stamp != l.latest }

// look takes the samples that DCGM keeps, oldest first, and returns how many
// events are new. Those of the first look happened before the source began:
// they tell the last code and are not counted. A code of 0 is no event; DCGM
// before 4.5 wrote one when the watch began.
func (l *xidLedger) look(samples []sample) (fresh int) {
	if len(samples) > maxXIDsKept {
		samples = samples[len(samples)-maxXIDsKept:]
	}
	seen := make(map[int64]bool, len(samples))
	for i := range samples {
		s := &samples[i]
		code, ok := s.number()
		spec := &fields[slotXID]
		if !ok || code <= spec.min || code > spec.max || s.status != 0 {
			continue
		}
		if !l.seen[s.stamp] && !seen[s.stamp] {
			l.code = int(code)
			if l.begun {
				fresh++
			}
		}
		seen[s.stamp] = true
	}
	// A lost cache (the host engine began anew) forgets nothing here: stamps only
	// matter while DCGM still shows them, or could.
	for stamp := range l.seen {
		if len(seen) >= maxXIDsKept {
			break
		}
		seen[stamp] = true
	}
	l.seen = seen
	l.events += float64(fresh)
	l.begun = true
	return fresh
}
