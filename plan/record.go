package plan

// Record is all that is needed to compute a decision again: together with the
// plan (or the inputs it compiles from) it must give the same Decision.
type Record struct {
	// Plan is the digest of the plan that decided.
	Plan  string
	Class Class
	Seed  uint64
	// Counts are the in-flight counts in the order in which they were read.
	Counts   []int32
	Decision Decision

	live Live // while deciding
}

// DecideRecorded decides like Decide and fills rec, whose Counts are reused: it
// allocates only while they grow. rec must not be shared.
func (p *Plan) DecideRecorded(c Class, seed uint64, live Live, rec *Record) Decision {
	if live == nil {
		live = idle{}
	}
	*rec = Record{Plan: p.digest, Class: c, Seed: seed, Counts: rec.Counts[:0], live: live}
	rec.Decision = p.Decide(c, seed, (*recorder)(rec))
	rec.live = nil
	return rec.Decision
}

// recorder notes what live answers.
type recorder Record

func (r *recorder) InFlight(slot uint32) int32 {
	n := r.live.InFlight(slot)
	r.Counts = append(r.Counts, n)
	return n
}

// Replay decides once more from a record. It returns the decision, and true if
// the plan is the one that decided, all counts of the record were needed and no
// others, and the decision is the same.
func (p *Plan) Replay(r Record) (Decision, bool) {
	tape := player{counts: r.Counts}
	d := p.Decide(r.Class, r.Seed, &tape)
	return d, r.Plan == p.digest && !tape.short && len(tape.counts) == 0 && d == r.Decision
}

// player answers from a record's counts.
type player struct {
	counts []int32
	short  bool // more was asked for than was recorded
}

func (t *player) InFlight(uint32) int32 {
	if len(t.counts) == 0 {
		t.short = true
		return 0
	}
	n := t.counts[0]
	t.counts = t.counts[1:]
	return n
}
