package serve

import (
	"math"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
)

// summaryBuckets is how many buckets a scaling signal looks back over: 5 s.
const summaryBuckets = int(5 * time.Second / bucket)

// summary is a ring of a pool's values, one a bucket.
type summary struct {
	values [summaryBuckets]float64
	n, at  int
}

func (s *summary) add(v float64) {
	s.values[s.at] = v
	s.at = (s.at + 1) % summaryBuckets
	s.n = min(s.n+1, summaryBuckets)
}

func (s *summary) show() admin.Summary {
	if s.n == 0 {
		return admin.Summary{}
	}
	sum := 0.0
	for _, v := range s.values[:s.n] {
		sum += v
	}
	mean := sum / float64(s.n)
	squares := 0.0
	for _, v := range s.values[:s.n] {
		squares += (v - mean) * (v - mean)
	}
	return admin.Summary{Mean: mean, Deviation: math.Sqrt(squares / float64(s.n)), N: s.n}
}

// scaling are the two-window signals of one pool: ejection goes by single
// samples, scaling by mean and deviation over five seconds.
type scaling struct {
	risk, allocation summary
}

// add takes one bucket's endpoints; those of which nothing is known don't count.
func (s *scaling) add(endpoints []admin.Endpoint) {
	var risk, allocation mean
	for i := range endpoints {
		e := &endpoints[i]
		if e.Known {
			risk.add(e.Risk)
		}
		if e.Allocation >= 0 {
			allocation.add(e.Allocation)
		}
	}
	risk.into(&s.risk)
	allocation.into(&s.allocation)
}

type mean struct {
	sum float64
	n   int
}

func (m *mean) add(v float64) { m.sum += v; m.n++ }

func (m *mean) into(s *summary) {
	if m.n > 0 {
		s.add(m.sum / float64(m.n))
	}
}
