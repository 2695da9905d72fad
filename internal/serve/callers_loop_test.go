package serve

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

const heartbeat = 10 * time.Second

// played is something that happens in a provider's pool.
type played struct {
	at time.Duration
	do func()
}

type playedHeap []played

func (h playedHeap) Len() int           { return len(h) }
func (h playedHeap) Less(i, j int) bool { return h[i].at < h[j].at }
func (h playedHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *playedHeap) Push(x any)        { *h = append(*h, x.(played)) }
func (h *playedHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// key is a provider's customer with some workers, each of which sends its next request
// when it has an answer, or when it was told to come back.
type key struct {
	client  admission.Client // zero: nobody knows whose it is
	workers int
	answers time.Duration // how long its answers take
	think   time.Duration // between two requests of a worker
	spent   bool          // it has used up its limit
	made    bool          // each of its requests shows another credential, which none takes
	begins  time.Duration
	served  int
	refused int           // by Fairlead
	vain    int           // by the provider
	out     time.Duration // for how long its workers were refused in all
}

// outUntil is until when a client is kept out, and when one asked since then, as in package
// admission.
type outUntil struct {
	told, until, took, asked time.Duration
	lets                     int
}

// provider is a pool of a provider's servers and who asks there, as the scoring sees them.
// Callers that it keeps out, or finds no place for, come back as they are told, a second
// later where nobody knows.
type provider struct {
	t     *testing.T
	rng   *rand.Rand
	s     *scoring
	begin time.Time
	now   time.Duration
	queue playedHeap
	keys  []*key
	away  map[admission.Client]*outUntil
	ids   int
	plan  plan.PoolInput
	// wait is what a refusal tells, 0 is nothing; refusal is how long it takes.
	wait, refusal time.Duration
	// down is when the servers refuse everybody.
	down func(time.Duration) bool
	// vain are its refusals while it was down.
	vain int
	// refuses is whether a server, by its place, refuses a request of a key beside.
	refuses func(w *provider, k *key, server int) bool
	// inside is how many requests each key and each server has.
	inside   map[*key]int
	insideOf map[fleet.EndpointKey]int
}

func newProvider(t *testing.T, seed uint64, servers int, keys ...*key) *provider {
	p := fleet.Pool{Name: "provider", MaxInFlight: 256, Limit: fleet.LimitFixed, Telemetry: fleet.Telemetry{Source: fleet.TelemetryNone}}
	for i := range servers {
		p.Endpoints = append(p.Endpoints, fleet.Endpoint{Name: fmt.Sprint(i), Address: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(i+1)), Capacity: 1})
	}
	cfg := &fleet.Config{Pools: []fleet.Pool{p}, Routes: []fleet.Route{{Name: "chat", Split: fleet.Split{{Pool: p.Name, Weight: 1}}}}}
	w := &provider{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), s: newViewed(t, cfg).scoring, begin: time.Now(), keys: keys,
		inside: map[*key]int{}, insideOf: map[fleet.EndpointKey]int{}, away: map[admission.Client]*outUntil{}, wait: 30 * time.Second, refusal: 30 * time.Millisecond, down: func(time.Duration) bool { return false },
	}
	w.s.ledger = accesslog.NewLedger(func() time.Time { return w.begin.Add(w.now) })
	w.tick()
	for _, k := range keys {
		for range k.workers {
			w.after(k.begins+w.upTo(2*time.Second), func() { w.ask(k) })
		}
	}
	return w
}

func (w *provider) after(d time.Duration, do func()) { heap.Push(&w.queue, played{w.now + d, do}) }

func (w *provider) upTo(d time.Duration) time.Duration { return time.Duration(w.rng.Int64N(int64(d))) }

func (w *provider) tick() {
	in, _ := w.s.step(w.begin.Add(w.now))
	w.s.published()
	w.plan = in.Pools[0]
	w.after(tickEvery, w.tick)
}

// run plays for so long.
func (w *provider) run(d time.Duration) {
	for until := w.now + d; w.queue[0].at < until; {
		e := heap.Pop(&w.queue).(played)
		w.now = e.at
		e.do()
	}
}

// choose is the server with the least in flight of those that have room.
func (w *provider) choose() (on fleet.EndpointKey, ok bool) {
	least := int32(0)
	for i := range w.plan.Endpoints {
		e := &w.plan.Endpoints[i]
		n := w.s.ledger.InFlight(e.Slot)
		if !e.Closed && n < e.MaxInFlight && (!ok || n < least) {
			on, least, ok = fleet.EndpointKey{Pool: w.plan.Name, Address: e.Address}, n, true
		}
	}
	return on, ok
}

// again lets a worker come back.
func (w *provider) again(k *key, d time.Duration) { w.after(d, func() { w.ask(k) }) }

func (w *provider) ask(k *key) {
	w.ids++
	of := k.client
	if k.made {
		of = admission.Client{255, byte(w.ids), byte(w.ids >> 8)}
	}
	out := w.away[of]
	if out != nil {
		until := out.until
		if out.asked > 0 { // the gate lets one in first
			until = max(until, out.asked+reopenEarly+2*out.took)
		}
		if until > w.now && out.lets == 0 {
			k.refused++
			k.out += until - w.now
			w.again(k, until-w.now+w.upTo(50*time.Millisecond))
			return
		}
	}
	on, ok := w.choose()
	if !ok {
		wait := w.opens() + w.upTo(100*time.Millisecond)
		k.refused++
		k.out += wait
		w.again(k, wait)
		return
	}
	if out != nil && (out.lets > 0 || out.asked < out.until) {
		out.asked, out.lets = w.now, max(0, out.lets-1)
	}
	o := fleet.Outcome{Node: "n", ID: fmt.Sprint(w.ids), Attempt: 1, Route: "chat", Endpoint: on}
	slot := w.s.ledger.Slot(on)
	w.s.ledger.Hold(on)
	began := w.now
	told := w.tell(o, fleet.AttemptStarted, of, 0, func(time.Duration) {})
	o.Cause, o.Code = fleet.CauseOK, http.StatusOK
	took := max(10*time.Millisecond, k.answers/2+w.upTo(k.answers+1))
	o.HeaderTime = min(took, 100*time.Millisecond)
	if k.spent || k.made || w.down(w.now) || w.refuses != nil && w.refuses(w, k, int(on.Address.Port())-1) {
		o.Cause, o.Code, o.RetryAfter = fleet.CauseThrottled, http.StatusTooManyRequests, w.wait
		took = w.refusal
		o.HeaderTime = took
		k.vain++
		if w.down(w.now) {
			w.vain++
		}
	} else {
		k.served++
		w.inside[k]++
		w.insideOf[on]++
	}
	o.Duration = took
	for beat := heartbeat; beat < took; beat += heartbeat {
		w.after(beat, func() {
			o := o
			o.Duration = beat
			w.tell(o, fleet.Heartbeat, of, told, func(time.Duration) {})
		})
	}
	w.after(took, func() {
		if o.Cause == fleet.CauseOK {
			w.inside[k]--
			w.insideOf[on]--
		}
		w.tell(o, fleet.AttemptEnded, of, told, func(stay time.Duration) {
			w.s.ledger.Release(slot, 1)
			if out := w.away[of]; out != nil && o.Cause == fleet.CauseOK {
				if out.lets++; out.asked > 0 && began >= out.asked {
					delete(w.away, of)
				}
			}
			if stay > 0 {
				out := &outUntil{told: w.now, until: w.now + stay, took: o.Duration}
				if before := w.away[of]; before != nil && began <= before.told {
					out.told, out.until = before.told, max(out.until, before.until)
				}
				w.away[of] = out
			}
		})
		if o.Cause == fleet.CauseOK {
			w.again(k, k.think/2+w.upTo(k.think+1))
		} else {
			w.again(k, max(o.RetryAfter, time.Second)+w.upTo(50*time.Millisecond))
		}
	})
}

// opens is when the first server takes requests again.
func (w *provider) opens() time.Duration {
	wait := time.Minute
	for _, e := range w.plan.Endpoints {
		until := w.s.endpoints[fleet.EndpointKey{Pool: w.plan.Name, Address: e.Address}].closed.until
		wait = min(wait, until.Sub(w.begin.Add(w.now)))
	}
	if wait <= 0 {
		return time.Second
	}
	return max(wait, 50*time.Millisecond)
}

// tell logs what happened, at a batch's end and after what was logged before.
func (w *provider) tell(o fleet.Outcome, kind fleet.OutcomeKind, of admission.Client, notBefore time.Duration, then func(time.Duration)) (at time.Duration) {
	at = max(w.now+5*time.Millisecond+w.upTo(70*time.Millisecond), notBefore+1)
	w.after(at-w.now, func() {
		o.Kind, o.At = kind, w.begin.Add(w.now)
		then(w.s.outcome(o, byKey(of)))
	})
	return at
}

func someKeys(first byte, n int, like key) []*key {
	keys := make([]*key, n)
	for i := range keys {
		k := like
		if k.client != (admission.Client{}) {
			k.client = admission.Client{first, byte(i + 1)}
		}
		keys[i] = &k
	}
	return keys
}

const playedSeeds = 2

// TestKeysThatAProviderLimits beside others that it takes: these are kept out for a small
// part of their time in three minutes, and in vain asks of each key hardly more than one
// in the time that it was told to stay away (a second where it told none). All begin
// within two seconds, when nobody knows yet whom the provider takes.
func TestKeysThatAProviderLimits(t *testing.T) {
	known := admission.Client{255}
	const s = time.Second
	good := func(n int, answers time.Duration) []*key {
		return someKeys(1, n, key{client: known, workers: 4, answers: answers, think: 300 * time.Millisecond})
	}
	late := func(n int, answers time.Duration) []*key {
		return someKeys(1, n, key{client: known, workers: 4, answers: answers, think: 300 * time.Millisecond, begins: 5 * s})
	}
	spent := func(n, workers int) []*key {
		return someKeys(2, n, key{client: known, workers: workers, spent: true, think: s})
	}
	made := func(workers int, begins time.Duration) []*key {
		return []*key{{workers: workers, made: true, begins: begins}}
	}
	for name, row := range map[string]struct {
		servers       int
		good, spent   []*key
		wait, refusal time.Duration
		out           float64 // part of the others' time, at most
		vain          float64 // of each key, in each wait
	}{
		"one of six":                       {1, good(5, s), spent(1, 1), 30 * s, 0, 0.02, 1.5},
		"one with twelve workers":          {1, good(5, s), spent(1, 12), 30 * s, 0, 0.02, 2},
		"half of them":                     {1, good(5, s), spent(5, 1), 30 * s, 0, 0.04, 1.5},
		"half of them, untold":             {1, good(5, s), spent(5, 1), 0, 0, 0.04, 1.5},
		"five, beside long answers":        {1, good(3, 8*s), spent(5, 1), 30 * s, 0, 0.04, 1.5},
		"twelve, beside long answers":      {1, good(3, 8*s), spent(12, 1), 30 * s, 0, 0.06, 1.5},
		"twelve with four, long answers":   {1, good(3, 8*s), spent(12, 4), 30 * s, 0, 0.06, 2},
		"twelve, long answers, untold":     {1, good(3, 8*s), spent(12, 1), 0, 0, 0.04, 1.5},
		"twelve with four, untold":         {1, good(3, 8*s), spent(12, 4), 0, 0, 0.1, 1.5},
		"a hundred and thirty":             {1, good(10, 4*s), spent(130, 1), 30 * s, 0, 0.15, 1.5},
		"forty, beside long answers":       {1, good(3, 8*s), spent(40, 1), 30 * s, 0, 0.2, 1.5},
		"twelve, answers of two minutes":   {1, good(3, 120*s), spent(12, 1), 30 * s, 0, 0.06, 1.5},
		"one beside one":                   {1, good(1, 8*s), spent(1, 4), 30 * s, 0, 0.02, 2},
		"two beside one":                   {1, good(1, 8*s), spent(2, 4), 30 * s, 0, 0.03, 2},
		"slow refusals":                    {1, good(3, 8*s), spent(5, 4), 30 * s, 2 * s, 0.02, 5},
		"one of six, on four servers":      {4, good(5, s), spent(1, 1), 30 * s, 0, 0.01, 1.5},
		"one with twelve, on four servers": {4, good(5, s), spent(1, 12), 30 * s, 0, 0.05, 6},
		"five with four, on four servers":  {4, good(3, 8*s), spent(5, 4), 30 * s, 0, 0.06, 3.5},
		"two with four, on two servers":    {2, good(3, 8*s), spent(2, 4), 30 * s, 0, 0.05, 2.5},
		"one, before others come, on two":  {2, late(5, s), spent(1, 4), 30 * s, 0, 0.02, 4},
		"one, before others come, on four": {4, late(5, s), spent(1, 8), 30 * s, 0, 0.02, 8},
		"made up by one, from the start":   {1, good(10, 2*s), made(64, 0), 30 * s, 0, 0.03, 64},
		"made up, two servers, from start": {2, good(10, 2*s), made(64, 0), 30 * s, 0, 0.1, 64},
		"made up, four, from the start":    {4, good(10, 2*s), made(64, 0), 30 * s, 0, 0.08, 64},
		"made up by one":                   {1, good(10, 2*s), made(64, 20*s), 30 * s, 0, 0.01, 64},
		"made up by one, beside two":       {1, good(2, 2*s), made(64, 20*s), 30 * s, 0, 0.01, 64},
		"made up by one, on two servers":   {2, good(10, 2*s), made(64, 20*s), 30 * s, 0, 0.01, 64},
		"made up by one, on four servers":  {4, good(10, 2*s), made(64, 20*s), 30 * s, 0, 0.01, 64},
		"made up by many":                  {4, good(10, 2*s), made(256, 20*s), 30 * s, 0, 0.01, 256},
	} {
		var out, served, vain float64
		for seed := range uint64(playedSeeds) {
			others, limited := clone(row.good), clone(row.spent)
			w := newProvider(t, seed, row.servers, slices.Concat(others, limited)...)
			w.wait, w.refusal = row.wait, max(w.refusal, row.refusal)
			const length = 180 * s
			w.run(length)
			for _, k := range others {
				out += k.out.Seconds() / (length.Seconds() * float64(k.workers*len(others)*playedSeeds))
				served += float64(k.served) / playedSeeds
			}
			for _, k := range limited {
				vain += float64(k.vain) / float64(len(limited)*playedSeeds) * max(s, row.wait).Seconds() / length.Seconds()
			}
		}
		t.Logf("%s: others kept out for %.3f of their time, %.0f requests served; each limited key asked %.1f times in vain in its wait", name, out, served, vain)
		if out > row.out || vain > row.vain {
			t.Errorf("%s: others kept out for %.3f of their time, each limited key asked %.1f times in vain; want %.3f and %.1f at most", name, out, vain, row.out, row.vain)
		}
	}
}

func clone(keys []*key) []*key {
	out := make([]*key, len(keys))
	for i, k := range keys {
		c := *k
		out[i] = &c
	}
	return out
}

// bucketOf is how many requests a key may send at once, which a minute refills.
const bucketOf = 60

// bucketed limits the keys whose clients begin with 2 to a request a second, of which it
// saves some up.
func bucketed() func(*provider, *key, int) bool {
	type bucket struct {
		left float64
		at   time.Duration
	}
	buckets := map[*key]*bucket{}
	return func(w *provider, k *key, _ int) bool {
		if k.client[0] != 2 {
			return false
		}
		b := buckets[k]
		if b == nil {
			b = &bucket{left: bucketOf}
			buckets[k] = b
		}
		b.left, b.at = min(bucketOf, b.left+(w.now-b.at).Seconds()), w.now
		if b.left < 1 {
			return true
		}
		b.left--
		return false
	}
}

// TestClientsOfServersThatSayNoToSome are served nearly as often as if they obeyed their
// servers alone, or more often since others take what one refuses. Few ask in vain.
func TestClientsOfServersThatSayNoToSome(t *testing.T) {
	known := admission.Client{255}
	const s = time.Second
	good := someKeys(1, 3, key{client: known, workers: 4, answers: 4 * s, think: s / 2})
	some := func(n, workers int, answers time.Duration) []*key {
		return someKeys(2, n, key{client: known, workers: workers, answers: answers, think: s / 5})
	}
	busy := func(server int) bool { return server == 0 }
	fourAtTwo := func(w *provider, _ *key, server int) bool {
		return server < 2 && w.insideOf[w.server(server)] >= 4
	}
	for name, row := range map[string]struct {
		servers    int
		good, some []*key
		wait       time.Duration
		refuses    func(*provider, *key, int) bool
		out        float64 // part of the good ones' time, at most
		served     float64 // requests of some, at least
		vain       float64 // of all, at most
	}{
		"five with a bucket each":               {1, good, some(5, 4, s), s, bucketed(), 0.03, 800, 1500},
		"five with a bucket each, for long":     {1, good, some(5, 4, s), 30 * s, bucketed(), 0.02, 750, 120},
		"ten with a bucket each":                {1, good, some(10, 4, s), s, bucketed(), 0.02, 1600, 3000},
		"five with four at a time":              {1, good, some(5, 6, s), s, fourEach, 0.02, 1600, 1500},
		"five with four at a time, for long":    {1, good, some(5, 6, s), 30 * s, fourEach, 0.02, 1600, 100},
		"five with a bucket each, two servers":  {2, good, some(5, 4, s), s, bucketed(), 0.02, 780, 900},
		"five with a bucket each, four servers": {4, good, some(5, 4, s), s, bucketed(), 0.02, 780, 900},
		"ten with a bucket each, two servers":   {2, good, some(10, 4, s), s, bucketed(), 0.03, 1500, 1800},
		"ten with a bucket each, four servers":  {4, good, some(10, 4, s), s, bucketed(), 0.02, 1500, 1800},
		"one with a bucket, forty workers":      {4, good, some(1, 40, s), s, bucketed(), 0.02, 150, 2000},
		"five with four at a time, two servers": {2, good, some(5, 6, s), s, fourEach, 0.02, 1600, 1500},
		"two of four take four":                 {4, good, some(3, 8, 2*s), s, fourAtTwo, 0.02, 1000, 500},
		"two of four take four, for long":       {4, good, some(3, 8, 2*s), 30 * s, fourAtTwo, 0.06, 500, 100},
		"one of eight takes four, for long": {8, nil, some(1, 64, 2*s), 30 * s, func(w *provider, _ *key, server int) bool {
			return busy(server) && w.insideOf[w.server(server)] >= 4
		}, 0, 2200, 120},
		"one of four refuses all, to one client": {4, nil, some(1, 24, 2*s), 30 * s, func(_ *provider, _ *key, server int) bool {
			return busy(server)
		}, 0, 1000, 60},
		"half of eight refuse all": {8, good, some(1, 48, 2*s), 30 * s, func(_ *provider, _ *key, server int) bool {
			return server < 4
		}, 0.02, 1900, 200},
		"a third of what one of four is asked": {4, good, some(3, 8, 2*s), 5 * s, func(w *provider, _ *key, server int) bool {
			return busy(server) && w.rng.IntN(3) == 0
		}, 0.02, 1000, 150},
	} {
		var out, served, vain float64
		const length = 120 * s
		for seed := range uint64(playedSeeds) {
			others, those := clone(row.good), clone(row.some)
			w := newProvider(t, seed, row.servers, slices.Concat(others, those)...)
			w.wait, w.refuses = row.wait, row.refuses
			w.run(length)
			for _, k := range others {
				out += k.out.Seconds() / (length.Seconds() * float64(k.workers*len(others)*playedSeeds))
				vain += float64(k.vain) / playedSeeds
			}
			for _, k := range those {
				served += float64(k.served) / playedSeeds
				vain += float64(k.vain) / playedSeeds
			}
		}
		t.Logf("%s: others kept out for %.3f of their time, %.0f requests served, %.0f in vain", name, out, served, vain)
		if out > row.out || served < row.served || vain > row.vain {
			t.Errorf("%s: others kept out for %.3f of their time, %.0f requests served, %.0f in vain; want %.3f at most, %.0f and %.0f at most", name, out, served, vain, row.out, row.served, row.vain)
		}
	}
}

// fourEach takes four requests of a key at a time.
func fourEach(w *provider, k *key, _ int) bool { return k.client[0] == 2 && w.inside[k] >= 4 }

func (w *provider) server(place int) fleet.EndpointKey {
	return fleet.EndpointKey{Pool: w.plan.Name, Address: w.plan.Endpoints[place].Address}
}

// TestProvidersThatLimitEverybody for two minutes are asked by few meanwhile, and by all
// when they are well again.
func TestProvidersThatLimitEverybody(t *testing.T) {
	known := admission.Client{255}
	const s = time.Second
	for name, row := range map[string]struct {
		servers, keys, workers int
		client                 admission.Client
		wait, refusal          time.Duration
		vain                   float64 // requests in two minutes, at most
		served                 float64 // of each worker in 45 s after, at least
		first                  bool    // nobody was ever taken before
	}{
		"forty keys":                     {1, 40, 1, known, 30 * s, 0, 50, 12, false},
		"forty keys with four":           {1, 40, 4, known, 30 * s, 0, 60, 12, false},
		"forty keys, untold":             {1, 40, 1, known, 0, 0, 160, 15, false}, // one a second asks
		"two hundred keys":               {1, 200, 1, known, 30 * s, 0, 60, 12, false},
		"two hundred keys, untold":       {1, 200, 1, known, 0, 0, 180, 15, false},
		"three keys with twelve":         {1, 3, 12, known, 30 * s, 0, 30, 8, false},
		"one key with twelve":            {1, 1, 12, known, 30 * s, 0, 10, 12, false},
		"nobody knows whose":             {1, 40, 1, admission.Client{}, 30 * s, 0, 12, 5, false},
		"forty keys, slow refusals":      {1, 40, 1, known, 30 * s, 5 * s, 180, 8, false}, // each once in its wait
		"forty keys on four servers":     {4, 40, 1, known, 30 * s, 0, 80, 12, false},
		"forty keys on four, untold":     {4, 40, 1, known, 0, 0, 580, 15, false},
		"three keys with twelve, four":   {4, 3, 12, known, 30 * s, 0, 60, 12, false},
		"forty keys, from the start":     {1, 40, 1, known, 30 * s, 0, 30, 12, true},
		"forty, on four, from the start": {4, 40, 1, known, 30 * s, 0, 40, 12, true},
		"forty, untold, from the start":  {1, 40, 1, known, 0, 0, 160, 15, true},
	} {
		var vain, served float64
		for seed := range uint64(playedSeeds) {
			keys := someKeys(1, row.keys, key{client: row.client, workers: row.workers, answers: 2 * s, think: 300 * time.Millisecond})
			w := newProvider(t, seed, row.servers, keys...)
			w.wait, w.refusal = row.wait, max(w.refusal, row.refusal)
			w.down = func(now time.Duration) bool { return (now > 20*s || row.first) && now < 140*s }
			w.run(140 * s)
			vain += float64(w.vain) / playedSeeds
			before := 0
			for _, k := range keys {
				before += k.served
			}
			w.run(45 * s)
			for _, k := range keys {
				served += float64(k.served) / float64(playedSeeds*len(keys)*row.workers)
			}
			served -= float64(before) / float64(playedSeeds*len(keys)*row.workers)
		}
		t.Logf("%s: %.0f of %d workers' requests were in vain; each was served %.1f times in 45 s after", name, vain, row.keys*row.workers, served)
		if vain > row.vain || served < row.served {
			t.Errorf("%s: %.0f requests were in vain, and each worker was served %.1f times in 45 s after; want %.0f at most, and %.0f", name, vain, served, row.vain, row.served)
		}
	}
}
