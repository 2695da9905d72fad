package scrape

import (
	"bytes"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

const (
	// maxRows bounds the GPUs and MIG instances that one page may name: twice a
	// node of 16 GPUs cut into 7 instances each, the GPUs themselves included.
	maxRows = 256
	// maxIdentity bounds what is kept of the texts that name a GPU (real ones have
	// some 100 bytes), maxLabels the copy of a series' labels (some 300).
	maxIdentity, maxLabels = 512, 4096
	// frozenAfter is how long a GPU's energy counter may stand still. The driver
	// renews it every 100 ms or less, dcgm-exporter at its collection interval,
	// which is 30 s unless someone sets it.
	frozenAfter = 2 * time.Second
)

// selector picks GPUs by the beginning of their UUID, and one MIG instance of
// those if instance is not "".
type selector struct {
	uuid, instance string
}

// newSelectors reads an endpoint's list: "GPU-8a3b…", a beginning of it, or
// "GPU-8a3b…/3" for instance 3.
func newSelectors(gpus []string) []selector {
	out := make([]selector, 0, len(gpus))
	for _, g := range gpus {
		var s selector
		s.uuid = g
		if uuid, instance, ok := strings.Cut(g, "/"); ok {
			s.uuid, s.instance = uuid, instance
		}
		if s.uuid = bareUUID(s.uuid); s.uuid != "" {
			out = append(out, s)
		}
	}
	return out
}

// bareUUID is a UUID without its prefix, which nvidia_gpu_exporter leaves out.
func bareUUID(uuid string) string { return strings.TrimPrefix(uuid, "GPU-") }

// share says how much of a row counts for an endpoint.
type share uint8

const (
	shareNone   share = iota
	shareDevice       // what concerns the whole device: power, XID, condition
	shareAll
)

// gpuRow is one GPU, or MIG instance, of a page.
type gpuRow struct {
	gpu   telemetry.GPU // of which only ID, Profile and Model outlive a page
	uuid  string        // "" if the series have none
	inst  string        // MIG instance, "" for a whole GPU
	index string        // the exporter's number; tells rows without a UUID apart
	share share
	raw   []byte // labels of its newest series, to know the next one's at a glance

	cells  [quantities - engineQuantities][ranks]cell
	seen   bool
	energy float64
	moved  time.Time // when energy last differed; zero before its first value
	frozen bool
}

// gpuPage reads the pages of one GPU exporter, one after the other, for one
// endpoint. It remembers the GPUs' energy counters, because an exporter that
// answers 200 may show numbers that nobody renews: dcgm-exporter serves DCGM's
// cache, which neither a hung host engine nor a long collection interval empties.
type gpuPage struct {
	selectors []selector
	rows      []*gpuRow
	gpus      []telemetry.GPU // scratch

	stats    Stats
	rejected int
	frozen   int // rows left out on the newest page
	dropped  int // series beyond maxRows and maxIdentity
}

func newGPUPage(gpus []string) *gpuPage { return &gpuPage{selectors: newSelectors(gpus)} }

// read scans a page that arrived at now and returns the GPUs that count for the
// endpoint: those it names, those whose series name no GPU (they speak for the
// node), and all where it names none. The slice is valid until the next read.
func (p *gpuPage) read(page []byte, now time.Time) []telemetry.GPU {
	for _, r := range p.rows {
		r.cells, r.seen = [len(r.cells)][ranks]cell{}, false
	}
	p.rejected, p.frozen, p.dropped = 0, 0, 0
	last := -1
	p.stats = Scan(page, gpuNames.names, func(id int, labels []byte, value float64) {
		if last = p.find(labels, last); last < 0 {
			p.dropped++
			return
		}
		r := p.rows[last]
		r.seen = true
		for i := range gpuNames.aliases[id] {
			a := &gpuNames.aliases[id][i]
			if !r.cells[a.q-engineQuantities][a.rank].add(a.q, value*a.scale) {
				p.rejected++
			}
		}
	})
	p.forgetUnseen()
	for _, r := range p.rows {
		r.watchEnergy(now)
	}
	p.gpus = p.gpus[:0]
	for _, r := range p.rows {
		if r.share == shareNone {
			continue
		}
		if p.isFrozen(r) {
			p.frozen++
			continue
		}
		p.gpus = append(p.gpus, r.fill(now))
	}
	return p.gpus
}

// identity is what names a GPU in a series' labels.
type identity struct {
	uuid, inst, profile, model, index []byte
}

func (id *identity) size() int {
	return len(id.uuid) + len(id.inst) + len(id.profile) + len(id.model) + len(id.index)
}

func identify(labels []byte) (id identity) {
	for {
		key, value, rest, ok := nextLabel(labels)
		if !ok {
			return id
		}
		switch string(key) {
		case "UUID", "uuid":
			id.uuid = value
		case "GPU_I_ID":
			id.inst = value
		case "GPU_I_PROFILE":
			id.profile = value
		case "modelName":
			id.model = value
		case "gpu":
			id.index = value
		}
		labels = rest
	}
}

// find returns the row of a series' GPU, made if it is new, or −1 beyond
// maxRows and maxIdentity. Exporters list the GPUs in the same order and with the same labels
// under each name, so it looks at the row after the last one first.
func (p *gpuPage) find(labels []byte, last int) int {
	next := last + 1
	if next >= len(p.rows) {
		next = 0
	}
	if next < len(p.rows) && bytes.Equal(p.rows[next].raw, labels) && len(labels) > 0 {
		return next
	}
	id := identify(labels)
	for i := range p.rows {
		k := (next + i) % len(p.rows)
		if r := p.rows[k]; r.is(&id) {
			if len(labels) <= maxLabels {
				r.raw = append(r.raw[:0], labels...)
			}
			return k
		}
	}
	if len(p.rows) >= maxRows || id.size() > maxIdentity {
		return -1
	}
	p.rows = append(p.rows, p.newRow(&id))
	return len(p.rows) - 1
}

// is reports whether the row is this GPU's. An instance id that was dealt anew
// to another profile is another instance.
func (r *gpuRow) is(id *identity) bool {
	return r.uuid == string(id.uuid) && r.inst == string(id.inst) &&
		(r.uuid != "" || r.index == string(id.index)) &&
		(r.inst == "" || r.gpu.Profile == string(id.profile))
}

func (p *gpuPage) newRow(id *identity) *gpuRow {
	r := &gpuRow{uuid: string(id.uuid), inst: string(id.inst), index: string(id.index)}
	r.gpu = telemetry.GPU{ID: r.uuid, Profile: string(id.profile), Model: string(id.model)}
	if r.inst != "" {
		r.gpu.ID += "/" + r.inst
	}
	r.share = p.shareOf(r)
	return r
}

func (p *gpuPage) shareOf(r *gpuRow) share {
	if len(p.selectors) == 0 || r.uuid == "" {
		return shareAll
	}
	most := shareNone
	for _, s := range p.selectors {
		switch {
		case !strings.HasPrefix(bareUUID(r.uuid), s.uuid):
		case s.instance == "" || s.instance == r.inst:
			most = shareAll
		case r.inst == "":
			most = max(most, shareDevice)
		}
	}
	return most
}

// forgetUnseen drops the rows that the page no longer has.
func (p *gpuPage) forgetUnseen() {
	kept := p.rows[:0]
	for _, r := range p.rows {
		if r.seen {
			kept = append(kept, r)
		}
	}
	clear(p.rows[len(kept):])
	p.rows = kept
}

func (r *gpuRow) get(q quantity) (float64, bool) { return best(&r.cells[q-engineQuantities]) }

// watchEnergy ages the row by its energy counter. A GPU that draws no power at
// all may have a counter that stands still.
func (r *gpuRow) watchEnergy(now time.Time) {
	energy, ok := r.get(qEnergy)
	if !ok {
		r.moved, r.frozen = time.Time{}, false
		return
	}
	if r.moved.IsZero() || energy != r.energy {
		r.energy, r.moved = energy, now
	}
	watts, known := r.get(qPower)
	r.frozen = now.Sub(r.moved) > frozenAfter && (!known || watts > 0)
}

// isFrozen reports whether the row's numbers stand still: by its own energy, or
// for an instance without one by that of its GPU.
func (p *gpuPage) isFrozen(r *gpuRow) bool {
	if r.inst == "" || !r.moved.IsZero() {
		return r.frozen
	}
	for _, whole := range p.rows {
		if whole.inst == "" && whole.uuid == r.uuid {
			return whole.frozen
		}
	}
	return false
}

// fill returns what the page said of the GPU.
func (r *gpuRow) fill(now time.Time) telemetry.GPU {
	g := r.gpu
	g.At = now
	set := func(q quantity, to *float64, has telemetry.GPUMask) {
		if v, ok := r.get(q); ok {
			*to = v
			g.Known |= has
		}
	}
	set(qPower, &g.PowerWatts, telemetry.GPUHasPower)
	if xid, ok := r.get(qXID); ok {
		g.XID = int(xid)
		g.Known |= telemetry.GPUHasXID
	}
	if action, ok := r.get(qRecovery); ok {
		g.Recovery = telemetry.RecoveryAction(action)
		g.Known |= telemetry.GPUHasRecovery
	}
	failed, okFailed := r.get(qRemapFailed)
	pending, okPending := r.get(qRemapPending)
	if okFailed || okPending {
		g.RemapFailed, g.RemapPending = failed > 0, pending > 0
		g.Known |= telemetry.GPUHasRemap
	}
	if r.share == shareDevice {
		return g
	}
	set(qGPUUtil, &g.Util, telemetry.GPUHasUtil)
	set(qGRActive, &g.GRActive, telemetry.GPUHasGRActive)
	set(qDRAMActive, &g.DRAMActive, telemetry.GPUHasDRAMActive)
	set(qFBUsed, &g.FBUsedMiB, telemetry.GPUHasFBUsed)
	r.fillTotal(&g)
	tx, okTX := r.get(qPCIeTX)
	rx, okRX := r.get(qPCIeRX)
	if okTX || okRX {
		g.PCIeTX, g.PCIeRX = tx, rx
		g.Known |= telemetry.GPUHasPCIe
	}
	gen, okGen := r.get(qLinkGen)
	width, okWidth := r.get(qLinkWidth)
	if okGen && okWidth {
		g.PCIeLink = telemetry.PCIeBandwidth(int(gen), int(width))
		g.Known |= telemetry.GPUHasPCIeLink
	}
	return g
}

// fillTotal writes the framebuffer's size without what the driver reserves: what
// is used and what is free, since DCGM's total includes the reserve and its
// default list has no total.
func (r *gpuRow) fillTotal(g *telemetry.GPU) {
	used, okUsed := r.get(qFBUsed)
	free, okFree := r.get(qFBFree)
	total, ok := r.get(qFBTotal)
	switch {
	case okUsed && okFree && used+free > 0:
		g.FBTotalMiB = used + free
	case ok:
		if reserved, known := r.get(qFBReserved); known && reserved < total {
			total -= reserved
		}
		g.FBTotalMiB = total
	default:
		return
	}
	g.Known |= telemetry.GPUHasFBTotal
}
