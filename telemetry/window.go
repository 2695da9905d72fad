package telemetry

import (
	"math"
	"time"
)

// WindowTicks is how many samples a [Window] keeps: 5 s at the default tick of
// 200 ms, the longest span any feature looks back over.
const WindowTicks = 25

// Window is a bounded ring of one endpoint's newest samples. It holds no clock:
// time comes in with each sample and with each question. The zero Window is
// empty and ready; Add and all reading methods allocate nothing. It is not safe
// for concurrent use.
type Window struct {
	ring  [WindowTicks]Sample
	next  int // where the next sample goes
	n     int
	moved time.Time

	gpuSeen   bool
	xid       int
	xidEvents float64
	xidSince  time.Time
}

// Add appends a sample and drops the oldest when the ring is full. A sample
// older than the newest one is ignored, so that spans are never negative.
// Where s.Changed is zero it is filled by [Sample.Settle].
func (w *Window) Add(s Sample) {
	if newest, ok := w.Latest(); ok && s.At.Before(newest.At) {
		return
	}
	prev := w.latestEngine()
	if s.Changed.IsZero() {
		s.Settle(prev)
	}
	// A source may see the engine move by more than a sample holds.
	sourceSaw := s.busy() && s.Changed.Equal(s.At)
	if s.Known.HasEngine() && (prev == nil || sourceSaw || engineMoved(prev, &s)) {
		w.moved = s.At
	}
	w.noteXID(&s)
	w.ring[w.next] = s
	w.next = (w.next + 1) % WindowTicks
	w.n = min(w.n+1, WindowTicks)
}

// Len is the number of samples held.
func (w *Window) Len() int { return w.n }

// Latest returns the newest sample, or nil and false. The pointer is valid
// until the next Add and must not be written through.
func (w *Window) Latest() (*Sample, bool) {
	if w.n == 0 {
		return nil, false
	}
	return w.back(0), true
}

// back returns the i-th newest sample; 0 is the newest.
func (w *Window) back(i int) *Sample {
	return &w.ring[(w.next-1-i+2*WindowTicks)%WindowTicks]
}

// latestEngine returns the newest sample with any engine number, or nil.
func (w *Window) latestEngine() *Sample {
	for i := range w.n {
		if s := w.back(i); s.Known.HasEngine() {
			return s
		}
	}
	return nil
}

// Last returns the newest sample that knows all of fields and arrived at most
// maxAge before now. It bridges single ticks in which a field was blank.
func (w *Window) Last(fields Mask, now time.Time, maxAge time.Duration) (*Sample, bool) {
	for i := range w.n {
		s := w.back(i)
		if now.Sub(s.At) > maxAge {
			break
		}
		if s.Known.Has(fields) {
			return s, true
		}
	}
	return nil, false
}

// Never is the age of a window that has not seen a single engine number.
const Never = time.Duration(math.MaxInt64)

// Age is how long ago the endpoint last gave proof of live engine numbers; see
// [Sample.Settle] for what counts. It is never negative.
func (w *Window) Age(now time.Time) time.Duration {
	s, ok := w.Latest()
	if !ok || s.Changed.IsZero() {
		return Never
	}
	return max(0, now.Sub(s.Changed))
}

// Moved is when any engine number last differed from the one before, idle or
// not; zero if none was seen. Unlike Age it also stands still for a healthy
// idle engine: ask it only where work is known to be running.
func (w *Window) Moved() time.Time { return w.moved }

// engineFields are the numbers that come from the model server, as opposed to
// the GPU.
const engineFields = HasKVUsage | HasRunning | HasWaiting | HasPromptTokens |
	HasGenerationTokens | HasPreemptions | HasTTFT | HasQueuedTokens

// gpuFields are the numbers that come from the GPU.
const gpuFields = HasGPUUtil | HasDRAMActive | HasFBUsed | HasPower | HasXID |
	HasGRActive | HasFBTotal | HasPCIe | HasCondition

// HasGPU reports whether any number of the GPU is known.
func (m Mask) HasGPU() bool { return m&gpuFields != 0 }

// HasEngine reports whether any number of the model server is known.
func (m Mask) HasEngine() bool { return m&engineFields != 0 }

// Settle fills Changed from prev, the newest sample before with engine numbers
// (nil if there is none).
//
// A page can answer 200 for ever with numbers that nobody updates (exporters
// that cache, an engine whose metrics thread died). So a sample proves life
// only if
//   - at least one engine number is known, and
//   - it differs from the sample before in some engine number, or the engine
//     says it is idle (nothing running, nothing waiting), because an idle
//     engine's numbers rightly stand still.
//
// With work running the generated-tokens counter moves every step, so equal
// numbers then mean frozen numbers: Changed keeps its old value and the sample
// ages. A page frozen while idle is not seen here; [Window.Moved] together with
// own requests in flight shows it.
func (s *Sample) Settle(prev *Sample) {
	switch {
	case !s.Known.HasEngine():
		s.Changed = time.Time{}
		if prev != nil {
			s.Changed = prev.Changed
		}
	case prev == nil || prev.Changed.IsZero() || engineMoved(prev, s) || !s.busy():
		s.Changed = s.At
	default:
		s.Changed = prev.Changed
	}
}

func (s *Sample) busy() bool {
	return s.Known.Has(HasRunning) && s.Running > 0 || s.Known.Has(HasWaiting) && s.Waiting > 0
}

// engineMoved reports whether any engine number differs, or is known in only
// one of the two.
func engineMoved(a, b *Sample) bool {
	if a.Known&engineFields != b.Known&engineFields {
		return true
	}
	return a.KVUsage != b.KVUsage || a.Running != b.Running || a.Waiting != b.Waiting ||
		a.PromptTokens != b.PromptTokens || a.GenerationTokens != b.GenerationTokens ||
		a.Preemptions != b.Preemptions || a.TTFTSum != b.TTFTSum || a.TTFTCount != b.TTFTCount ||
		a.QueuedTokens != b.QueuedTokens
}

// Value returns one field of the sample, or false if it is unknown or f is not
// exactly one field. For HasTTFT it is the histogram's sum in seconds.
func (s *Sample) Value(f Mask) (float64, bool) {
	if s.Known&f == 0 {
		return 0, false
	}
	switch f {
	case HasKVUsage:
		return s.KVUsage, true
	case HasRunning:
		return s.Running, true
	case HasWaiting:
		return s.Waiting, true
	case HasKVTokens:
		return s.KVTokens, true
	case HasMaxSeqs:
		return s.MaxSeqs, true
	case HasPromptTokens:
		return s.PromptTokens, true
	case HasGenerationTokens:
		return s.GenerationTokens, true
	case HasPreemptions:
		return s.Preemptions, true
	case HasTTFT:
		return s.TTFTSum, true
	case HasGPUUtil:
		return s.GPUUtil, true
	case HasDRAMActive:
		return s.DRAMActive, true
	case HasFBUsed:
		return s.FBUsedMiB, true
	case HasPower:
		return s.PowerWatts, true
	case HasXID:
		return float64(s.XID), true
	case HasQueuedTokens:
		return s.QueuedTokens, true
	case HasGRActive:
		return s.GRActive, true
	case HasFBTotal:
		return s.FBTotalMiB, true
	case HasPCIe:
		return s.PCIeShare, true
	case HasCondition:
		return float64(s.Condition), true
	}
	return 0, false
}

// span calls visit for each sample that knows f and lies at most over before
// the newest sample, newest first, with its time in seconds relative to the
// newest (≤ 0). It returns how many it visited.
func (w *Window) span(f Mask, over time.Duration, visit func(t, v float64)) int {
	if w.n == 0 {
		return 0
	}
	end, seen := w.back(0).At, 0
	for i := range w.n {
		s := w.back(i)
		age := end.Sub(s.At)
		if age > over {
			break
		}
		if v, ok := s.Value(f); ok {
			visit(-age.Seconds(), v)
			seen++
		}
	}
	return seen
}

// Each calls visit for each sample that lies at most over before the newest,
// newest first. visit must not keep or write the sample.
func (w *Window) Each(over time.Duration, visit func(*Sample)) {
	if w.n == 0 {
		return
	}
	end := w.back(0).At
	for i := range w.n {
		s := w.back(i)
		if end.Sub(s.At) > over {
			return
		}
		visit(s)
	}
}

// Newest is the newest value of field f, however old, or false if no sample
// knows it: for what changes seldom, such as capacities.
func (w *Window) Newest(f Mask) (float64, bool) {
	for i := range w.n {
		if v, ok := w.back(i).Value(f); ok {
			return v, true
		}
	}
	return 0, false
}

// GrowthBetween is the sum of the rises of field f from sample to sample, per
// second, over the samples between from and to before the newest (from > to ≥
// 0). Falls count as nothing. False with fewer than two points or none apart in
// time.
func (w *Window) GrowthBetween(f Mask, from, to time.Duration) (float64, bool) {
	var sum, newer, newest, oldest float64
	n := 0
	w.span(f, from, func(t, v float64) {
		if -t < to.Seconds() {
			return
		}
		if n == 0 {
			newest = t
		} else {
			sum += max(0, newer-v)
		}
		newer, oldest = v, t
		n++
	})
	if n < 2 || newest <= oldest {
		return 0, false
	}
	return sum / (newest - oldest), true
}

// Delta is the growth of counter f over the last over. A counter that fell was
// reset: that one difference is dropped and counting goes on from the lower
// value; resets says how often. False with fewer than two points.
func (w *Window) Delta(f Mask, over time.Duration) (delta float64, resets int, ok bool) {
	var newer float64
	first := true
	n := w.span(f, over, func(_, v float64) {
		switch {
		case first:
			first = false
		case newer >= v:
			delta += newer - v
		default:
			resets++
		}
		newer = v
	})
	return delta, resets, n >= 2
}

// MeanTTFT is the mean time to first token of the requests whose first token
// came in the last over, from the engine's own histogram; count is their
// number. False when there were none, or the histogram was reset.
func (w *Window) MeanTTFT(over time.Duration) (mean time.Duration, count float64, ok bool) {
	if w.n == 0 {
		return 0, 0, false
	}
	end := w.back(0).At
	var newest, oldest *Sample
	for i := range w.n {
		s := w.back(i)
		if end.Sub(s.At) > over {
			break
		}
		if !s.Known.Has(HasTTFT) {
			continue
		}
		if newest == nil {
			newest = s
		}
		oldest = s
	}
	if newest == nil {
		return 0, 0, false
	}
	count = newest.TTFTCount - oldest.TTFTCount
	sum := newest.TTFTSum - oldest.TTFTSum
	if count <= 0 || sum < 0 {
		return 0, 0, false
	}
	return time.Duration(sum / count * float64(time.Second)), count, true
}

// XID returns the GPU's last known XID code, 0 for none, and when it appeared;
// since is zero for a code that stood there when the GPU was first seen. The
// gauge itself never clears, so only a recent since is news. Where the source
// counts XIDs a repeat of the same code is news too.
//
// A GPU seen without the series has code 0 if it never had another (some
// exporters omit the series until the first event); later on a missing series
// is a blank and changes nothing.
func (w *Window) XID() (code int, since time.Time) { return w.xid, w.xidSince }

func (w *Window) noteXID(s *Sample) {
	switch {
	case s.Known.Has(HasXID):
		if w.gpuSeen && w.xidIsNews(s) {
			w.xidSince = s.At
		}
		w.xid, w.xidEvents, w.gpuSeen = s.XID, s.XIDEvents, true
	case s.Known.HasGPU():
		w.gpuSeen = true
	}
}

// xidIsNews tells by the count where there is one: of several GPUs' codes the
// gravest may go away and leave another that has long stood. Where the count did
// not rise, as when it began anew, only a graver code is news.
func (w *Window) xidIsNews(s *Sample) bool {
	switch {
	case s.XIDEvents > w.xidEvents:
		return true
	case s.XIDEvents == 0 && w.xidEvents == 0:
		return s.XID != w.xid
	}
	return graverXID(s.XID, w.xid)
}
