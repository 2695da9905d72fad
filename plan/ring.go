package plan

import (
	"encoding/binary"
	"math"
	"math/bits"
	"net/netip"
)

// Session is what requests that belong together share, as a hash of their key;
// 0 is no session.
type Session uint64

// SessionOf hashes a session's key, the same in every process; an empty key is
// no session. The key itself is not kept, so that records hold nothing of the
// caller's.
func SessionOf(key []byte) Session {
	if len(key) == 0 {
		return 0
	}
	h := mix(uint64(len(key)) + golden)
	for ; len(key) >= 8; key = key[8:] {
		h = mix(h ^ binary.LittleEndian.Uint64(key))
	}
	if len(key) > 0 {
		var rest [8]byte
		copy(rest[:], key)
		h = mix(h ^ binary.LittleEndian.Uint64(rest[:]))
	}
	return Session(max(h, 1))
}

// probes is how many places of the ring a session looks at. One endpoint has one
// point; the more probes, the more even the shares: over 50 rings of 100
// endpoints the largest share is on average 5.3 times the mean with one probe,
// 1.6 times with 4, 1.5 times with 5 and 1.4 times with 8. The load bound takes
// care of what is left.
const probes = 5

// ring gives every session a home among a pool's endpoints, by multi-probe
// consistent hashing (B. Appleton, M. O'Reilly, arXiv:1505.00062): each endpoint
// has one point on a circle of 2⁶⁴, made from its address alone; the home is the
// endpoint whose point follows most closely on one of the session's probes. So
// an endpoint that comes takes sessions from all others alike, and one that goes
// moves only its own. Building takes linear time, which matters five times a
// second; classic rings need a hundred points per endpoint for even shares.
type ring struct {
	points []point // in order of at
	// first holds, for each of the equal parts of the circle, the index of the
	// first point in that part or after.
	first []int32
	shift uint // from a place on the circle to its part
	// most is how many attempts an endpoint may have in flight to take a session's
	// next one: a quarter more than the mean, and a little. Mirrokni, Thorup and
	// Zadimoghaddam (arXiv:1608.01350) show that with such a bound a session
	// moves rarely and no endpoint gets more than its bound.
	most int32
}

type point struct {
	at       uint64
	endpoint int32
}

// loadBound and slackShare make the bound: so much of the mean, and one part in
// slackShare of the mean limit. In a pool that idles the mean is near 0, and a
// conversation's parallel calls would lose their cached prefix for a load that no
// engine feels.
const (
	loadBound  = 1.25
	slackShare = 16
)

// newRing builds the ring over the endpoints of set.
func newRing(in []EndpointInput, set []int32) ring {
	n := len(set)
	if n == 0 {
		return ring{}
	}
	parts := bits.Len(uint(n)) + 1
	r := ring{points: make([]point, n), first: make([]int32, 1<<parts+1), shift: uint(64 - parts)}
	inFlight, limits := int64(0), int64(0)
	places := make([]uint64, n)
	for i, e := range set {
		inFlight += int64(in[e].InFlight)
		limits += int64(in[e].limit())
		places[i] = place(in[e].Address)
		r.first[places[i]>>r.shift+1]++
	}
	for part := range 1 << parts {
		r.first[part+1] += r.first[part]
	}
	filled := make([]int32, 1<<parts)
	for i, e := range set {
		part := places[i] >> r.shift
		low := r.first[part]
		k := low + filled[part]
		filled[part]++
		for k > low && r.points[k-1].at > places[i] {
			r.points[k] = r.points[k-1]
			k--
		}
		r.points[k] = point{at: places[i], endpoint: e}
	}
	bound := loadBound*float64(inFlight)/float64(n) + max(1, float64(limits)/float64(n)/slackShare)
	r.most = int32(min(bound, math.MaxInt32))
	return r
}

// place is an endpoint's point on the circle.
func place(a netip.AddrPort) uint64 {
	ip := a.Addr().As16()
	h := mix(binary.BigEndian.Uint64(ip[:8]) + golden)
	h = mix(h ^ binary.BigEndian.Uint64(ip[8:]))
	return mix(h ^ uint64(a.Port()))
}

// home is a session's endpoint; the ring is not empty.
func (r *ring) home(s Session) int32 {
	home, nearest := int32(0), uint64(math.MaxUint64)
	// Two hashes make all probes (A. Kirsch, M. Mitzenmacher, "Less hashing, same
	// performance", 2006).
	at, step := mix(uint64(s)), mix(uint64(s)+golden)
	for range probes {
		at += step
		i := int(r.first[at>>r.shift])
		for i < len(r.points) && r.points[i].at < at {
			i++
		}
		if i == len(r.points) {
			i = 0
		}
		if distance := r.points[i].at - at; distance < nearest {
			home, nearest = r.points[i].endpoint, distance
		}
	}
	return home
}
