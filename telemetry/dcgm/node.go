package dcgm

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// blankReads is after how many blank reads in a row, where values came before,
// a watch is made anew: profiling fields can stay blank after an XID 31 until
// then (DCGM issue 202). It doubles for each attempt that did not help.
const (
	blankReadsToRewatch    = 10
	maxBlankReadsToRewatch = 1280 // some four minutes at 200 ms
)

// frozenAfter is how long the energy counter may stand while power is drawn. It
// counts millijoules, so a GPU that lives moves it in any sample.
const frozenAfter = 2 * time.Second

// maxRemembered bounds the GPUs that are remembered by UUID: DCGM knows up to 32
// at a time.
const maxRemembered = 64

// topology is what there is to read.
type topology struct {
	gpus      []uint32 // DCGM's ids of the GPUs
	instances []instance
}

// instance is a MIG instance.
type instance struct {
	id, gpu uint32 // DCGM's ids of the instance and of its GPU
	uuid    string // of the GPU
	nvml    uint   // NVML's instance id
	profile string
	// shape tells instances of other sizes apart where the profile has no name.
	shape [2]uint
}

func (t *topology) sort() {
	slices.Sort(t.gpus)
	slices.SortFunc(t.instances, func(a, b instance) int { return cmp.Compare(a.id, b.id) })
}

// same compares what makes up the identities; profile names are looked up
// later.
func (t topology) same(o topology) bool {
	return slices.Equal(t.gpus, o.gpus) && slices.EqualFunc(t.instances, o.instances, func(a, b instance) bool {
		a.profile, b.profile = "", ""
		return a == b
	})
}

// name returns the instance's profile, or what is known of its size.
func (i *instance) name() string {
	if i.profile != "" {
		return i.profile
	}
	return fmt.Sprintf("%dg.profile%d", i.shape[1], i.shape[0])
}

// device is what is known of one entity.
type device struct {
	entity   entity
	kind     entityKind
	instance *instance // of a MIG instance
	parent   *device   // of a MIG instance

	uuid, model string
	tracks      [slots]track

	energy      float64   // the counter's last value
	energyMoved time.Time // when it last moved, zero before its first value

	xid  *xidLedger // of a GPU
	lost bool
	at   time.Time // of the newest value that counted

	rewatchAfter int // blank reads that ask for a new watch
}

// remembered is a GPU that was there.
type remembered struct {
	model string
	xid   *xidLedger
}

// node holds what this node's GPUs said, and says what of it is known. It reads
// no clock and calls no one.
type node struct {
	interval time.Duration
	count    *counters

	epoch   uint32
	devices []*device // GPUs by id, then instances by id
	byID    map[entity]*device
	// known are the GPUs seen since the source began, by UUID.
	known map[string]*remembered

	newest    int64 // stamp of the last read that brought one
	pidsSince int64
	pids      map[uint32]pidBatch
	pidsOf    bool // processes can be told
}

// pidBatch is the processes of a GPU at one moment.
type pidBatch struct {
	stamp int64
	at    time.Time
	pids  []int
}

func newNode(interval time.Duration, count *counters) *node {
	return &node{interval: interval, count: count, known: make(map[string]*remembered)}
}

// begin starts an epoch with these GPUs and instances: what was read before is
// forgotten, except which GPUs there were and their XIDs.
func (n *node) begin(t topology) {
	n.epoch++
	n.devices = n.devices[:0]
	n.byID = make(map[entity]*device, len(t.gpus)+len(t.instances))
	n.newest, n.pidsSince, n.pids, n.pidsOf = 0, 0, make(map[uint32]pidBatch), false
	parents := make(map[uint32]string, len(t.instances))
	for i := range t.instances {
		parents[t.instances[i].gpu] = t.instances[i].uuid
	}
	add := func(d *device) {
		d.rewatchAfter = blankReadsToRewatch
		n.devices = append(n.devices, d)
		n.byID[d.entity] = d
	}
	for _, id := range t.gpus {
		d := &device{entity: entity{groupGPU, id}, kind: wholeGPU}
		if uuid, ok := parents[id]; ok {
			d.kind = parentGPU
			if uuid != "" {
				n.identify(d, uuid)
			}
		}
		add(d)
	}
	for i := range t.instances {
		inst := &t.instances[i]
		parent := n.byID[entity{groupGPU, inst.gpu}]
		if parent == nil {
			continue
		}
		add(&device{entity: entity{groupInstance, inst.id}, kind: gpuInstance, instance: inst, parent: parent})
	}
}

// identify gives a GPU its UUID, and with it what is remembered of it.
func (n *node) identify(d *device, uuid string) {
	d.uuid = uuid
	r := n.known[uuid]
	if r == nil {
		r = &remembered{xid: &xidLedger{}}
		if len(n.known) < maxRemembered {
			n.known[uuid] = r
		}
	}
	d.xid = r.xid
	if d.model == "" {
		d.model = r.model
	}
}

// entities lists the entities of a kind.
func (n *node) entities(kind entityKind) []entity {
	var list []entity
	for _, d := range n.devices {
		if d.kind == kind {
			list = append(list, d.entity)
		}
	}
	return list
}

// absorb takes the samples of one read, which began at begun by the local clock.
func (n *node) absorb(samples []sample, begun time.Time) {
	newest := n.newestChanged(samples)
	var blanks, ranges, nothing uint64
	for i := range samples {
		s := &samples[i]
		d := n.byID[s.entity]
		at, ok := slotOf[s.field]
		if d == nil || !ok {
			continue
		}
		if at == slotUUID || at == slotName {
			n.name(d, at, s)
			continue
		}
		switch d.tracks[at].take(&fields[at], s, begun, newest) {
		case blank:
			blanks++
		case outOfRange:
			ranges++
		case noData:
			if at != slotXID { // none is the rule
				nothing++
			}
		}
	}
	for _, d := range n.devices {
		d.watchEnergy(begun)
	}
	n.count.count(func(st *Stats) {
		st.Blank += blanks
		st.OutOfRange += ranges
		st.NoData += nothing
	})
	n.clock(newest, begun)
}

// newestChanged returns the newest stamp among the samples that are not those
// of the last read, 0 if there is none.
func (n *node) newestChanged(samples []sample) (newest int64) {
	for i := range samples {
		s := &samples[i]
		d := n.byID[s.entity]
		at, ok := slotOf[s.field]
		// XIDs keep the stamp of their event.
		if d == nil || !ok || s.status != 0 || at == slotXID || at == slotUUID || at == slotName {
			continue
		}
		if d.tracks[at].changed(s) {
			newest = max(newest, s.stamp)
		}
	}
	return newest
}

func (n *node) name(d *device, at slot, s *sample) {
	text, ok := s.string()
	if !ok {
		return // a GPU keeps its name while the driver can't tell it
	}
	if at == slotName {
		d.model = text
		if r := n.known[d.uuid]; r != nil {
			r.model = text
		}
		return
	}
	if d.uuid != text {
		n.identify(d, text)
		if r := n.known[text]; r != nil && d.model != "" {
			r.model = d.model
		}
	}
}

// skewLimit is from which difference of the clocks on they are called skewed.
const skewLimit = time.Second

// clock compares the host engine's clock with the local one and with itself.
func (n *node) clock(newest int64, now time.Time) {
	if newest == 0 {
		return
	}
	skew := time.Duration(newest-now.UnixMicro()) * time.Microsecond
	// Samples taken within one read may carry stamps a little out of order.
	back := n.newest-newest > (100 * time.Millisecond).Microseconds()
	n.newest = newest
	n.count.count(func(st *Stats) {
		st.Skew, st.Skewed = skew, skew.Abs() > skewLimit
		if back {
			st.ClockSteps++
		}
	})
}

// watchEnergy notes when the energy counter moves. A GPU whose numbers all keep
// coming with new stamps but never change is known by it. A counter at zero is
// none.
func (d *device) watchEnergy(now time.Time) {
	t := &d.tracks[slotEnergy]
	if !t.good || t.isBlank || t.value == 0 {
		d.energyMoved = time.Time{}
		return
	}
	if d.energyMoved.IsZero() || t.value != d.energy {
		d.energy, d.energyMoved = t.value, now
	}
}

// frozen reports whether the GPU draws power and its energy counter stands.
func (d *device) frozen(now time.Time, interval time.Duration) bool {
	if d.energyMoved.IsZero() || now.Sub(d.energyMoved) <= max(frozenAfter, 2*interval) {
		return false
	}
	for _, at := range []slot{slotPower, slotPowerAverage} {
		if t := &d.tracks[at]; t.good && !t.isBlank && t.value > 0 {
			return true
		}
	}
	return false
}

// value returns a field's value if it counts at now.
func (n *node) value(d *device, at slot, now time.Time) (float64, bool) {
	return d.tracks[at].known(now, fields[at].cadence.maxAge(n.interval))
}

// dark reports whether no number of a GPU counts at now: only then is it worth
// asking whether it is lost.
func (n *node) dark(d *device, now time.Time) bool {
	for at := range slots {
		switch fields[at].cadence {
		case everyTick, heartbeat:
			if _, ok := n.value(d, at, now); ok {
				return false
			}
		}
	}
	return true
}

// darkGPUs lists the GPUs of which nothing is known.
func (n *node) darkGPUs(now time.Time) []*device {
	var list []*device
	for _, d := range n.devices {
		if d.kind != gpuInstance && n.dark(d, now) {
			list = append(list, d)
		} else {
			d.lost = false
		}
	}
	return list
}

// blankWatches lists the kinds and sets of fields whose watch should be made
// anew, and expects that it is.
func (n *node) blankWatches() (list []watchKey) {
	for kind := wholeGPU; kind <= gpuInstance; kind++ {
		for spec, w := range watchSpecs[kind] {
			if n.blankFor(kind, w.slots) {
				list = append(list, watchKey{kind, spec})
			}
		}
	}
	return list
}

// watchKey names a set of fields in watchSpecs.
type watchKey struct {
	kind entityKind
	spec int
}

func (n *node) blankFor(kind entityKind, list []slot) (found bool) {
	for _, d := range n.devices {
		if d.kind != kind || d.lost || d.parent != nil && d.parent.lost {
			continue
		}
		most := 0
		for _, at := range list {
			if fields[at].cadence == everyTick {
				most = max(most, d.tracks[at].blankReads)
			}
		}
		if most < d.rewatchAfter {
			continue
		}
		found = true
		d.rewatchAfter = min(2*d.rewatchAfter, maxBlankReadsToRewatch)
		for _, at := range list {
			d.tracks[at].blankReads = 0
		}
	}
	return found
}

// settle takes back the patience with watches that gave values again.
func (n *node) settle() {
	for _, d := range n.devices {
		if d.rewatchAfter == blankReadsToRewatch {
			continue
		}
		well := true
		for at := range slots {
			if t := &d.tracks[at]; fields[at].cadence == everyTick && t.hadValue && t.isBlank {
				well = false
			}
		}
		if well {
			d.rewatchAfter = blankReadsToRewatch
		}
	}
}

// processes takes the samples of the process field: one for each process of a
// GPU, taken together every few seconds, and none where there is no process.
func (n *node) processes(samples []sample, now time.Time) {
	for i := range samples {
		s := &samples[i]
		if s.entity.group != groupGPU || s.status != 0 || s.kind != typeBinary {
			continue
		}
		n.pidsSince = max(n.pidsSince, s.stamp)
		b := n.pids[s.entity.id]
		// Samples of one moment may lie some microseconds apart.
		switch apart := time.Duration(s.stamp-b.stamp) * time.Microsecond; {
		case apart > time.Second || apart < -pidPeriod:
			b = pidBatch{stamp: s.stamp, at: now, pids: []int{int(s.bits)}}
		case apart < -time.Second:
			continue
		default:
			b.at = now
			if !slices.Contains(b.pids, int(s.bits)) {
				b.pids = append(b.pids, int(s.bits))
			}
		}
		n.pids[s.entity.id] = b
	}
}

// frame says what is known at now, which is when the read ended.
func (n *node) frame(now time.Time) telemetry.GPUFrame {
	f := telemetry.GPUFrame{At: now, Epoch: n.epoch, GPUs: make([]telemetry.GPU, 0, len(n.devices)+len(n.known))}
	var stale, frozen uint64
	for _, d := range n.devices {
		for at := range slots {
			if c := fields[at].cadence; c == everyTick || c == heartbeat || c == everySecond {
				if d.tracks[at].stale(now, c.maxAge(n.interval)) {
					stale++
				}
			}
		}
		if d.kind != gpuInstance && d.frozen(now, n.interval) {
			frozen++
		}
		if g, ok := n.gpu(d, now); ok {
			f.GPUs = append(f.GPUs, g)
		}
	}
	f.GPUs = append(f.GPUs, n.missing(now)...)
	f.Processes = n.processMap(now)
	n.count.count(func(st *Stats) {
		st.Epoch, st.GPUs = n.epoch, len(f.GPUs)
		st.Stale += stale
		st.Frozen += frozen
	})
	return f
}

// gpu returns what is known of a GPU or an instance, or false if it is not one
// that anything could run on: a GPU in MIG mode, or one without a UUID.
func (n *node) gpu(d *device, now time.Time) (g telemetry.GPU, ok bool) {
	board := d // what the instances of a GPU share
	switch d.kind {
	case parentGPU:
		return g, false
	case gpuInstance:
		board = d.parent
		uuid := cmp.Or(d.instance.uuid, board.uuid)
		if uuid == "" {
			return g, false
		}
		g.ID = fmt.Sprintf("%s/%d", uuid, d.instance.nvml)
		g.Profile = d.instance.name()
	default:
		if mode := &d.tracks[slotMIGMode]; d.uuid == "" || mode.good && mode.value == 1 {
			return g, false
		}
		g.ID = d.uuid
	}
	g.Model = board.model
	if board.lost {
		g.Lost, g.At = true, now
		return g, true
	}
	if !board.frozen(now, n.interval) {
		n.numbers(&g, d, board, now)
	}
	if n.dark(board, now) && n.dark(d, now) && g.Condition() <= telemetry.ConditionOK {
		// Levels are sampled once a second: those of a moment ago can't vouch for
		// a GPU that tells nothing now. Bad ones still count.
		g = telemetry.GPU{ID: g.ID, Profile: g.Profile, Model: g.Model}
	}
	if x := board.xid; x != nil && x.begun && (x.code != 0 || g.Known != 0) {
		g.XID, g.XIDEvents = x.code, x.events
		g.Known |= telemetry.GPUHasXID
	}
	if g.At.After(d.at) {
		d.at = g.At
	}
	g.At = d.at
	return g, true
}

// numbers fills in the numbers that count. An instance has its own activity and
// framebuffer; heat, link and health are those of the board it shares. Power and
// energy of the board say nothing about one instance, and NVML has no
// utilisation under MIG.
func (n *node) numbers(g *telemetry.GPU, d, board *device, now time.Time) {
	set := func(of *device, at slot, to *float64, has telemetry.GPUMask) bool {
		v, ok := n.value(of, at, now)
		if !ok {
			return false
		}
		*to = v
		g.Known |= has
		if t := of.tracks[at].goodAt; t.After(g.At) {
			g.At = t
		}
		return true
	}
	ratio := func(at slot, to *float64, has telemetry.GPUMask) {
		if set(d, at, to, has) {
			*to = min(*to, 1)
		}
	}
	ratio(slotGRActive, &g.GRActive, telemetry.GPUHasGRActive)
	ratio(slotSMActive, &g.SMActive, telemetry.GPUHasSMActive)
	ratio(slotTensorActive, &g.TensorActive, telemetry.GPUHasTensorActive)
	ratio(slotDRAMActive, &g.DRAMActive, telemetry.GPUHasDRAMActive)
	set(d, slotFBUsed, &g.FBUsedMiB, telemetry.GPUHasFBUsed)
	if set(d, slotFBTotal, &g.FBTotalMiB, telemetry.GPUHasFBTotal) {
		if reserved, ok := n.value(d, slotFBReserved, now); ok && reserved < g.FBTotalMiB {
			g.FBTotalMiB -= reserved
		}
	}
	if d == board {
		if set(d, slotUtil, &g.Util, telemetry.GPUHasUtil) {
			g.Util /= 100
		}
		// The mean over a second stands in where there is no power of the moment.
		_ = set(d, slotPower, &g.PowerWatts, telemetry.GPUHasPower) || set(d, slotPowerAverage, &g.PowerWatts, telemetry.GPUHasPower)
		if set(d, slotEnergy, &g.EnergyJoules, telemetry.GPUHasEnergy) {
			g.EnergyJoules /= 1000
		}
	}
	set(board, slotMargin, &g.TemperatureMargin, telemetry.GPUHasTemperatureMargin)
	var bits float64
	if set(board, slotThrottle, &bits, telemetry.GPUHasThrottle) {
		g.Throttle = telemetry.Throttle(bits)
	}
	n.link(g, board, set, now)
	n.health(g, board, set)
}

// setter fills in one number of a device.
type setter func(of *device, at slot, to *float64, has telemetry.GPUMask) bool

func (n *node) link(g *telemetry.GPU, board *device, set setter, now time.Time) {
	var tx, rx float64
	if !set(board, slotPCIeTX, &tx, 0) || !set(board, slotPCIeRX, &rx, 0) {
		return // what a link could carry tells nothing alone
	}
	g.PCIeTX, g.PCIeRX = tx, rx
	g.Known |= telemetry.GPUHasPCIe
	// A GPU at rest lowers its link's generation and raises it under load, so the
	// highest one counts. The width does not change with load: a narrower one is
	// a fault, and is what the link has.
	generation, ok := n.value(board, slotMaxLinkGen, now)
	lanes, wide := n.value(board, slotLinkWidth, now)
	if !wide {
		lanes, wide = n.value(board, slotMaxLinkWidth, now)
	}
	if link := telemetry.PCIeBandwidth(int(generation), int(lanes)); ok && wide && link > 0 {
		g.PCIeLink = link
		g.Known |= telemetry.GPUHasPCIeLink
	}
}

func (n *node) health(g *telemetry.GPU, board *device, set setter) {
	var action, failed, pending float64
	if set(board, slotRecoveryAction, &action, telemetry.GPUHasRecovery) {
		g.Recovery = telemetry.RecoveryAction(action)
	}
	set(board, slotDBE, &g.DBE, telemetry.GPUHasDBE)
	if set(board, slotRemapFailed, &failed, 0) && set(board, slotRemapPending, &pending, 0) {
		g.RemapFailed, g.RemapPending = failed > 0, pending > 0
		g.Known |= telemetry.GPUHasRemap
	}
}

// missing lists as lost the GPUs that were there once and are enumerated no
// more, while others are and all of those tell their UUIDs. (After an XID 79 a
// new host engine does not list the GPU at all.)
func (n *node) missing(now time.Time) (list []telemetry.GPU) {
	present := make(map[string]bool, len(n.devices))
	for _, d := range n.devices {
		if d.kind == gpuInstance {
			continue
		}
		if d.uuid == "" {
			return nil
		}
		present[d.uuid] = true
	}
	if len(present) == 0 {
		return nil
	}
	for uuid, r := range n.known {
		if !present[uuid] {
			list = append(list, telemetry.GPU{ID: uuid, Model: r.model, At: now, Lost: true})
		}
	}
	slices.SortFunc(list, func(a, b telemetry.GPU) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// processMap returns the processes of whole GPUs. Under MIG DCGM tells a
// process's GPU, not its instance, so such GPUs are left out; nil where no
// GPU's processes can be told.
func (n *node) processMap(now time.Time) map[int][]string {
	if !n.pidsOf {
		return nil
	}
	m := make(map[int][]string)
	for _, d := range n.devices {
		b, ok := n.pids[d.entity.id]
		if d.kind != wholeGPU || d.uuid == "" || !ok || now.Sub(b.at) > 3*pidPeriod {
			continue
		}
		for _, pid := range b.pids {
			m[pid] = append(m[pid], d.uuid)
		}
	}
	return m
}
