package extproc

import (
	"bytes"
	"math"
	"strconv"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// Admission decides what may enter, and what those are told that may not.
type Admission interface {
	// Admit is asked for each generating request that the plan doesn't refuse and whose
	// body isn't too large by its length: once, or again while it answers Held. Of the
	// Ask nothing but the ID may be kept.
	Admit(*admission.Ask) admission.Verdict
	// Refuse is told of a request that is refused for another reason, or for that of a
	// Verdict that was Held, and says when it may come back.
	Refuse(*admission.Ask, admission.Reason) admission.Refusal
	// Wait is how long a request would wait for a place of the pool if it were refused
	// now. It changes nothing.
	Wait(*admission.Ask) time.Duration
	// BeginHold says that the request found no place and is held; false where it was
	// told to come later than it does, and may not be. Else EndHold follows.
	BeginHold(*admission.Ask) bool
	EndHold(*admission.Ask)
	// Advise says when a request may come back that was admitted and that a server
	// sent away.
	Advise(*admission.Ask) admission.Refusal
	// Usual is how long a request of a pool and level counts at most that nobody
	// tells the end of.
	Usual(pool string, level fleet.BurstLevel) time.Duration
	// Cancel undoes an Admit that nothing came of.
	Cancel(id string)
}

// ask fills in what admission is asked.
func (s *Service) ask(a *admission.Ask, r *request, v *verdict, at time.Time) {
	arm := v.decision.Arm
	if v.decision.Action == plan.ActionLeave {
		arm = v.plan.Serving(v.class)
	}
	retry, counts := retries(r.pace.retries)
	client := r.client(v.info)
	*a = admission.Ask{
		ID:           v.idString,
		Route:        v.info.Name,
		Pool:         v.plan.PoolName(arm),
		Client:       client,
		Credential:   r.credential(v.info, client),
		Level:        v.class.Level,
		Class:        classOf(v.info, r),
		Input:        v.class.Prompt,
		InputAtLeast: v.class.PromptAtLeast,
		Output:       times(v.budget, v.answers),
		Answers:      int(v.answers),
		Unread:       v.source.guessed(),
		Stream:       r.stream,
		Unplaced:     v.decision.Action == plan.ActionLeave,
		Timeout:      r.pace.patience(),
		Retry:        retry,
		Counts:       counts,
		At:           at,
		Seed:         v.id.Seed(),
	}
}

// classOf is the route's class, or what the caller lowered it to.
func classOf(info *plan.RouteInfo, r *request) fleet.RequestClass {
	switch {
	case r.pace.batch:
		return fleet.ClassBatch
	case info.Class == 0:
		return fleet.ClassInteractive
	}
	return info.Class
}

// maxPatience is where waits saturate: nobody waits longer for a model.
const maxPatience = 24 * time.Hour

// patience is how long the caller waits for an attempt: the shortest of what its
// headers say, 0 if they say nothing that can be read.
func (p *pace) patience() time.Duration {
	shortest := time.Duration(0)
	for _, wait := range [...]time.Duration{seconds(p.timeout), seconds(p.readTimeout), grpcTimeout(p.grpcTimeout)} {
		if wait > 0 && (shortest == 0 || wait < shortest) {
			shortest = wait
		}
	}
	return shortest
}

// seconds reads a decimal number of seconds as official SDKs send it; 0 if it is
// none.
func seconds(b []byte) time.Duration {
	if b = bytes.TrimSpace(b); len(b) == 0 || len(b) > 20 {
		return 0
	}
	for _, c := range b {
		if (c < '0' || c > '9') && c != '.' {
			return 0
		}
	}
	f, err := strconv.ParseFloat(string(b), 64)
	if err != nil {
		return 0
	}
	return time.Duration(math.Ceil(min(f, maxPatience.Seconds()) * float64(time.Second)))
}

// grpcTimeout reads gRPC's own header: at most eight digits and a unit; 0 if it
// is none.
func grpcTimeout(b []byte) time.Duration {
	if len(b) < 2 || len(b) > 9 {
		return 0
	}
	unit := map[byte]time.Duration{'H': time.Hour, 'M': time.Minute, 'S': time.Second,
		'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond}[b[len(b)-1]]
	n, ok := digits(b[:len(b)-1])
	if !ok || unit == 0 {
		return 0
	}
	if n > uint64(maxPatience/unit) {
		return maxPatience
	}
	return time.Duration(n) * unit
}

// maxRetries is where counts of retries saturate.
const maxRetries = 1000

// retries reads a count of retries; 0 and false if it is none.
func retries(b []byte) (n int, ok bool) {
	count, ok := digits(b)
	return int(min(count, maxRetries)), ok
}

// digits reads 1 to 18 digits and nothing else.
func digits(b []byte) (n uint64, ok bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return n, true
}

// tokenTime is the assumed time per token of output of a server at its limit: 25
// ms, a usual target for inter-token latency.
const tokenTime = 25 * time.Millisecond

// expected is how long a request may count that nobody tells the end of; the ledger
// bounds it. What doesn't generate takes no time by the route's budget: it counts no
// longer than anything that nobody has told of.
func (s *Service) expected(v *verdict, pool plan.PoolID) time.Duration {
	switch {
	case !v.class.Generates:
		return 0
	case s.o.Admission != nil:
		return s.o.Admission.Usual(v.plan.PoolName(pool), v.class.Level)
	}
	return time.Duration(min(v.budget, maxPrompt)) * tokenTime
}
