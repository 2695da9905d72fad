package dcgm

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// maxFailures is how many reads in a row may fail for an unknown reason before
// the connection is made anew.
const maxFailures = 5

// reader does the DCGM calls of a source, one step at a time, on the goroutine
// that owns it. A step may hang for as long as DCGM does.
type reader struct {
	host     host
	interval time.Duration
	engine   engine
	node     *node
	count    *counters
	log      *slog.Logger

	connected bool
	there     topology
	sets      []entitySet
	failures  int
	checkSoon bool // the last read failed as it does when an entity has gone
	lastSlow  time.Time
	samples   []sample // reused by each read
	skewed    bool
}

// entitySet is the entities of one kind, and what is watched of them.
type entitySet struct {
	kind     entityKind
	entities []entity
	group    groupRef
	watches  []fieldWatch
	// tick and slow are the fields read at each tick, and those read once a
	// second in addition.
	tick, slow []fieldID
	pids       watchRef
}

// fieldWatch is a watch of the fields of watchSpecs[kind][spec], or of one of
// them.
type fieldWatch struct {
	ref  watchRef
	spec int
}

// errConnect marks a step that could not connect: the next should wait.
var errConnect = errors.New("connect to DCGM")

// step reads once, connecting before if needed.
func (r *reader) step() (telemetry.GPUFrame, error) {
	if !r.connected {
		if err := r.connect(); err != nil {
			r.count.failed(CauseConnect)
			return telemetry.GPUFrame{}, fmt.Errorf("%w at %s: %w", errConnect, r.host.text, err)
		}
	}
	f, err := r.read()
	if err == nil {
		r.failures = 0
		r.count.count(func(s *Stats) { s.Reads++ })
		return f, nil
	}
	cause := causeOf(err)
	r.count.failed(cause)
	r.failures++
	r.checkSoon = true
	if cause == CauseConnection || cause == CauseOther && r.failures >= maxFailures {
		r.disconnect()
	}
	return f, fmt.Errorf("read GPUs through DCGM at %s: %w", r.host.text, err)
}

func (r *reader) connect() error {
	if err := r.engine.open(r.host); err != nil {
		return err
	}
	r.connected, r.failures = true, 0
	if err := r.begin(); err != nil {
		r.disconnect()
		return err
	}
	r.count.count(func(s *Stats) { s.Connects++ })
	r.log.Info("connected to DCGM", "host", r.host.text, "gpus", len(r.there.gpus), "instances", len(r.there.instances), "epoch", r.node.epoch)
	return nil
}

// disconnect ends the connection. Its error says only that the other side is
// gone already.
func (r *reader) disconnect() {
	if !r.connected {
		return
	}
	r.connected, r.sets = false, nil
	if err := r.engine.close(); err != nil {
		r.log.Debug("end the connection to DCGM", "err", err)
	}
}

// begin finds out what there is, watches it, and starts an epoch.
func (r *reader) begin() error {
	t, err := r.engine.topology()
	if err != nil {
		return fmt.Errorf("list GPUs: %w", err)
	}
	return r.watch(t)
}

// watch watches what there is and starts an epoch. A host engine without GPUs
// may have begun before the driver; only a new connection finds them then.
func (r *reader) watch(t topology) error {
	if len(t.gpus) == 0 {
		return fmt.Errorf("%w: the host engine knows none", errNoGPU)
	}
	t.sort()
	r.nameProfiles(t)
	r.node.begin(t)
	r.there, r.lastSlow, r.checkSoon = t, time.Time{}, false
	var refused []int
	for kind := wholeGPU; kind <= gpuInstance; kind++ {
		entities := r.node.entities(kind)
		if len(entities) == 0 {
			continue
		}
		set, bad, err := r.watchSet(kind, entities)
		if err != nil {
			return err
		}
		r.sets = append(r.sets, set)
		refused = append(refused, bad...)
	}
	r.count.count(func(s *Stats) { s.Epoch, s.Unsupported = r.node.epoch, refused })
	if len(refused) > 0 {
		r.log.Warn("DCGM refuses to watch fields; what they tell stays unknown", "fields", refused)
	}
	return nil
}

// nameProfiles looks up the names of MIG profiles, such as 1g.10gb: DCGM gives
// them as the name of an instance, from the driver only.
func (r *reader) nameProfiles(t topology) {
	if len(t.instances) == 0 {
		return
	}
	entities := make([]entity, len(t.instances))
	for i := range t.instances {
		entities[i] = entity{groupInstance, t.instances[i].id}
	}
	samples, err := r.engine.latest(entities, []fieldID{fields[slotName].id}, true, nil)
	if err != nil {
		r.log.Debug("look up the names of MIG profiles", "err", err)
		return
	}
	for i := range samples {
		text, ok := samples[i].string()
		for j := range t.instances {
			if ok && t.instances[j].id == samples[i].entity.id {
				t.instances[j].profile = text
			}
		}
	}
}

func (r *reader) watchSet(kind entityKind, entities []entity) (set entitySet, refused []int, err error) {
	set = entitySet{kind: kind, entities: entities}
	label := [...]string{wholeGPU: "gpus", parentGPU: "mig-gpus", gpuInstance: "mig-instances"}[kind]
	if set.group, err = r.engine.group(label, entities); err != nil {
		return set, nil, fmt.Errorf("group %s: %w", label, err)
	}
	for i, spec := range watchSpecs[kind] {
		bad, err := r.watchSpec(&set, i, spec, label)
		if err != nil {
			return set, nil, err
		}
		refused = append(refused, bad...)
	}
	if len(set.tick) == 0 {
		return set, nil, fmt.Errorf("watch %s: DCGM refuses every field", label)
	}
	if kind == wholeGPU {
		set.pids, err = r.engine.watch(set.group, label+"-processes", []fieldID{pidField}, pidPeriod, 3*pidPeriod, 0)
		if err != nil {
			r.log.Info("DCGM does not list processes", "err", err)
			refused = append(refused, int(pidField))
		}
		r.node.pidsOf = err == nil
	}
	return set, refused, nil
}

// watchSpec watches a set of fields; where DCGM refuses the set, each field
// alone, because one that it does not know or may not read spoils the set.
func (r *reader) watchSpec(set *entitySet, at int, spec watchSpec, label string) (refused []int, err error) {
	every := fields[spec.slots[0]].cadence.period(r.interval)
	keep := max(spec.keep, 1)
	ids := make([]fieldID, len(spec.slots))
	for i, s := range spec.slots {
		ids[i] = fields[s].id
	}
	accept := func(ref watchRef, slots []slot) {
		set.watches = append(set.watches, fieldWatch{ref, at})
		for _, s := range slots {
			switch fields[s].cadence {
			case everyTick, heartbeat, event:
				set.tick = append(set.tick, fields[s].id)
			default:
				set.slow = append(set.slow, fields[s].id)
			}
		}
	}
	name := label + "-" + spec.name
	ref, err := r.engine.watch(set.group, name, ids, every, spec.keepFor, keep)
	if err == nil {
		accept(ref, spec.slots)
		return nil, nil
	}
	if causeOf(err) == CauseConnection {
		return nil, fmt.Errorf("watch %s: %w", name, err)
	}
	r.log.Debug("watch fields one by one", "fields", name, "err", err)
	for i, s := range spec.slots {
		ref, err := r.engine.watch(set.group, fmt.Sprintf("%s-%d", name, ids[i]), ids[i:i+1], every, spec.keepFor, keep)
		if err != nil {
			refused = append(refused, int(ids[i]))
			continue
		}
		accept(ref, []slot{s})
	}
	return refused, nil
}

// read reads once. The connection is made.
func (r *reader) read() (telemetry.GPUFrame, error) {
	begun := time.Now()
	slow := r.lastSlow.IsZero() || begun.Sub(r.lastSlow) >= slowPeriod-r.interval/2
	if slow || r.checkSoon {
		if err := r.refresh(); err != nil {
			return telemetry.GPUFrame{Epoch: r.node.epoch}, err
		}
	}
	// The calls before may have waited; samples are aged from here.
	begun = time.Now()
	r.samples = r.samples[:0]
	var err error
	for i := range r.sets {
		set := &r.sets[i]
		ids := set.tick
		if slow {
			ids = append(append(make([]fieldID, 0, len(set.tick)+len(set.slow)), set.tick...), set.slow...)
		}
		if r.samples, err = r.engine.latest(set.entities, ids, false, r.samples); err != nil {
			return telemetry.GPUFrame{Epoch: r.node.epoch}, err
		}
	}
	r.node.absorb(r.samples, begun)
	r.lookAtXIDs()
	if slow {
		r.lastSlow = begun
		r.lookAtProcesses()
	}
	for _, d := range r.node.darkGPUs(time.Now()) {
		r.askWhetherLost(d)
	}
	r.renewWatches()
	r.reportSkew()
	// Any of these calls may have waited: what is too old by now is not known.
	f := r.node.frame(time.Now())
	if len(f.GPUs) == 0 {
		return f, fmt.Errorf("%w: of %d GPUs none can be used whole or tells its UUID", errNoGPU, len(r.there.gpus))
	}
	return f, nil
}

// refresh begins a new epoch if GPUs or MIG instances came or went. Where DCGM
// does not tell, the read that follows fails too, and says why better.
func (r *reader) refresh() error {
	t, err := r.engine.topology()
	if err != nil {
		r.log.Debug("list GPUs", "err", err)
		return nil
	}
	r.checkSoon = false
	t.sort()
	if t.same(r.there) {
		return nil
	}
	r.log.Warn("GPUs or MIG instances changed", "gpus", len(t.gpus), "instances", len(t.instances))
	for i := range r.sets {
		set := &r.sets[i]
		for _, w := range set.watches {
			r.engine.dropWatch(w.ref)
		}
		r.engine.dropWatch(set.pids)
		r.engine.dropGroup(set.group)
	}
	r.sets = nil
	r.count.count(func(s *Stats) { s.Reconfigurations++ })
	if err := r.watch(t); err != nil {
		// Half of the watches is worse than none.
		r.disconnect()
		return err
	}
	return nil
}

// lookAtXIDs reads the kept XIDs of the GPUs whose newest one changed. Reading
// them only then keeps ticks cheap; reading all of them finds those that a
// newer one hides.
func (r *reader) lookAtXIDs() {
	xid := fields[slotXID].id
	due := make(map[entity]int64)
	for i := range r.samples {
		s := &r.samples[i]
		if s.field != xid {
			continue
		}
		d := r.node.byID[s.entity]
		stamp := s.stamp
		if _, ok := s.number(); !ok || s.status != 0 {
			stamp = 0 // none yet, or none to be had
		}
		if d != nil && d.xid != nil && d.xid.due(stamp) {
			due[s.entity] = stamp
		}
	}
	if len(due) == 0 {
		return
	}
	for i := range r.sets {
		for _, w := range r.sets[i].watches {
			if watchSpecs[r.sets[i].kind][w.spec].name != "xid" {
				continue
			}
			samples, err := r.engine.since(w.ref, 0, nil)
			if err != nil {
				// The ledgers stay due, so the next read looks again.
				r.log.Debug("read XIDs", "err", err)
				continue
			}
			r.noteXIDs(r.sets[i].entities, samples, due)
		}
	}
}

func (r *reader) noteXIDs(entities []entity, samples []sample, due map[entity]int64) {
	for _, e := range entities {
		stamp, ok := due[e]
		if !ok {
			continue
		}
		var own []sample
		for i := range samples {
			if samples[i].entity == e {
				own = append(own, samples[i])
			}
		}
		d := r.node.byID[e]
		fresh := d.xid.look(own)
		d.xid.latest = stamp
		if fresh > 0 {
			r.count.count(func(s *Stats) { s.XIDs += uint64(fresh) })
			r.log.Warn("XID", "gpu", d.uuid, "xid", d.xid.code, "class", telemetry.ClassifyXID(d.xid.code), "events", fresh)
		}
	}
}

func (r *reader) lookAtProcesses() {
	for i := range r.sets {
		ref := r.sets[i].pids
		if ref == 0 {
			continue
		}
		samples, err := r.engine.since(ref, r.node.pidsSince, nil)
		if err != nil {
			r.log.Debug("read processes", "err", err)
			continue
		}
		r.node.processes(samples, time.Now())
	}
}

func (r *reader) askWhetherLost(d *device) {
	lost := r.engine.gpuStatus(d.entity.id) == statusLost
	if lost && !d.lost {
		r.log.Error("the driver lost a GPU", "gpu", d.uuid, "dcgm", d.entity.id)
	}
	d.lost = lost
}

func (r *reader) renewWatches() {
	for _, key := range r.node.blankWatches() {
		for i := range r.sets {
			if r.sets[i].kind != key.kind {
				continue
			}
			for _, w := range r.sets[i].watches {
				if w.spec != key.spec {
					continue
				}
				r.log.Warn("values stay blank; watching them anew", "fields", watchSpecs[key.kind][key.spec].name)
				r.count.count(func(s *Stats) { s.Rewatches++ })
				if err := r.engine.rewatch(w.ref); err != nil {
					r.log.Warn("watch fields anew", "err", err)
				}
			}
		}
	}
	r.node.settle()
}

func (r *reader) reportSkew() {
	skew, skewed := r.count.skew()
	if skewed == r.skewed {
		return
	}
	r.skewed = skewed
	if skewed {
		r.log.Warn("the host engine's clock differs from this machine's; ages do not depend on it", "skew", skew)
	} else {
		r.log.Info("the host engine's clock agrees with this machine's again", "skew", skew)
	}
}
