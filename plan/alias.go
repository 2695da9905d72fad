package plan

import (
	"math"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// table draws an endpoint by weight in constant time: an alias table after
// M. D. Vose, "A linear algorithm for generating random numbers with a given
// distribution" (IEEE TSE 17(9), 1991).
type table struct {
	// cells[i].self are the candidates, each once and in endpoint order.
	cells []cell
}

// cell yields self when the coin is below threshold, otherwise alias.
type cell struct {
	threshold uint32
	self      int32
	alias     int32
}

// draw maps 32 uniform bits to a candidate. The upper half of random·n is the
// cell and the lower half, uniform inside the cell, is the coin. The coin moves
// in steps of n, so a share is off by at most 2⁻³² of the whole.
func (t *table) draw(random uint32) int32 {
	at := uint64(random) * uint64(len(t.cells))
	c := &t.cells[at>>32]
	if uint32(at) < c.threshold {
		return c.self
	}
	return c.alias
}

// levelSets are the candidates of each level. Levels with the same candidates
// share one slice.
type levelSets [fleet.BurstLevels][]int32

// newLevelSets picks a pool's candidates out of everyone with weight. A level's
// leave out endpoints whose free KV cache is known to be smaller than the level's
// upper budget, unless that would leave none.
func newLevelSets(in []EndpointInput, everyone []int32) (out levelSets) {
	last := everyone
	for level := range out {
		fitting := candidates(in, fleet.BurstLevel(level).UpperBudget())
		// Upper budgets rise with the level, so the sets are nested: equal
		// sizes are equal sets.
		switch len(fitting) {
		case 0, len(everyone):
			last = everyone
		case len(last):
		default:
			last = fitting
		}
		out[level] = last
	}
	return out
}

// idleSets are, for each level whose next smaller one is backlogged, its idle
// candidates; none elsewhere, and where all are idle or none is.
func idleSets(in *PoolInput, sets *levelSets) (out levelSets) {
	for level := 1; level < len(sets); level++ {
		if !in.Backlogged[level-1] {
			continue
		}
		var idle []int32
		for _, e := range sets[level] {
			if in.Endpoints[e].idle() {
				idle = append(idle, e)
			}
		}
		if len(idle) < len(sets[level]) {
			out[level] = idle
		}
	}
	return out
}

// shared returns the first level with the same slice.
func (s *levelSets) shared(level int) int {
	for k := range level {
		if len(s[k]) > 0 && len(s[k]) == len(s[level]) && &s[k][0] == &s[level][0] {
			return k
		}
	}
	return level
}

// tables builds a table for each level that has candidates.
func (s *levelSets) tables(in []EndpointInput) (out [fleet.BurstLevels]*table) {
	for level, set := range s {
		if first := s.shared(level); first < level {
			out[level] = out[first]
		} else if len(set) > 0 {
			out[level] = newTable(in, set)
		}
	}
	return out
}

// candidates lists the endpoints with weight whose free KV cache is unknown or
// holds need tokens.
func candidates(in []EndpointInput, need fleet.Tokens) []int32 {
	out := make([]int32, 0, len(in))
	for i := range in {
		e := &in[i]
		if e.weight() > 0 && (e.KVFree < 0 || e.KVFree >= need) {
			out = append(out, int32(i))
		}
	}
	return out
}

// newTable builds the table over the endpoints of set, which is not empty and
// whose weights are finite and above 0.
func newTable(in []EndpointInput, set []int32) *table {
	n := len(set)
	// Dividing by the largest weight first keeps the sum finite.
	largest := 0.0
	for _, e := range set {
		largest = max(largest, in[e].Weight)
	}
	sum := 0.0
	for _, e := range set {
		sum += in[e].Weight / largest
	}
	share := make([]float64, n) // in units of 1/n
	order := make([]int32, n)   // small ones from the left, large ones from the right
	small, large := 0, n
	for i, e := range set {
		share[i] = in[e].Weight / largest / sum * float64(n)
		if share[i] < 1 {
			order[small] = int32(i)
			small++
		} else {
			large--
			order[large] = int32(i)
		}
	}
	cells := make([]cell, n)
	for i, e := range set {
		cells[i] = cell{threshold: math.MaxUint32, self: e, alias: e}
	}
	for small > 0 && large < n {
		small--
		s, l := order[small], order[large]
		cells[s].threshold = uint32(share[s] * (1 << 32)) // share < 1, so it fits
		cells[s].alias = cells[l].self
		share[l] -= 1 - share[s]
		if share[l] < 1 {
			large++
			order[small] = l
			small++
		}
	}
	return &table{cells: cells}
}
