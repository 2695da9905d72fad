package push

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// Limits of a frame. A node has at most 16 GPUs of 7 MIG instances today.
const (
	maxEndpoints = 128
	maxGPUs      = 256
	maxName      = 253 // bytes of a node's name, a GPU's id, profile or model
	// maxInventory bounds the bytes of the GPUs' names, which are kept with every
	// node: 128 for each of maxGPUs; a MIG device of an H200 takes about 85.
	maxInventory = 32 << 10
	// maxReferences bounds how many GPUs the endpoints of a frame are on, all
	// together: one byte on the wire is 16 in memory.
	maxReferences = 8 * maxEndpoints
	maxAge        = time.Hour
	// maxMessage bounds a frame on the wire. A row costs at most 150 bytes
	// without texts and lists.
	maxMessage = 128 << 10
)

// decoder reads the frames of one stream. What it reads is hostile: a value
// that cannot be true is unknown, a row that cannot be read is refused, a frame
// that cannot be meant is an error.
type decoder struct {
	node      string
	sequence  uint64
	any       bool
	inventory []names
}

// names are what an inventory says of a GPU.
type names struct{ id, profile, model string }

// received is one frame as it arrived.
type received struct {
	Frame
	sequence uint64
	interval time.Duration // 0 if unknown
	dropped  uint64
	rejected int // values, rows and mask bits that cannot be true or are not known here
	refused  []*pushv1.Refusal
}

// decode reads m, which arrived at now, into r, whose memory it reuses. After
// an error r holds nothing of use, and the stream can go on.
func (d *decoder) decode(m *pushv1.Frame, now time.Time, r *received) error {
	if err := d.head(m); err != nil {
		return err
	}
	endpoints, gpus := r.Endpoints[:0], r.GPUs[:0]
	*r = received{
		Frame:    Frame{Node: d.node, Epoch: m.GetEpoch(), At: now, Err: clip(m.GetError())},
		sequence: m.GetSequence(), interval: span(m.GetIntervalUs()), dropped: min(m.GetDropped(), maxCounter),
	}
	for _, e := range m.GetEndpoints() {
		u, rejected, err := d.endpoint(e, now)
		if err == nil && slices.ContainsFunc(endpoints, func(o Update) bool { return o.Endpoint == u.Endpoint }) {
			err = errors.New("twice in one frame")
		}
		r.rejected += rejected
		if err != nil {
			r.refused = append(r.refused, &pushv1.Refusal{Address: clip(e.GetAddress()), Reason: err.Error()})
			continue
		}
		endpoints = append(endpoints, u)
	}
	seen := [maxGPUs]bool{}
	for _, row := range m.GetGpus() {
		i := row.GetIndex()
		if int64(i) >= int64(len(d.inventory)) || seen[i] {
			r.rejected++
			continue
		}
		seen[i] = true
		g, rejected, err := decodeGPU(row, d.inventory[i], now)
		if err != nil {
			r.rejected++
			continue
		}
		r.rejected += rejected
		gpus = append(gpus, g)
	}
	r.Endpoints, r.GPUs = endpoints, gpus
	return nil
}

// head checks what concerns the frame as a whole and takes over its inventory.
func (d *decoder) head(m *pushv1.Frame) error {
	switch {
	case d.any && m.GetSequence() <= d.sequence:
		return fmt.Errorf("sequence %d after %d", m.GetSequence(), d.sequence)
	case m.GetNode() != "" && d.node != "" && m.GetNode() != d.node:
		return fmt.Errorf("node %q in a stream of node %q", clip(m.GetNode()), d.node)
	case len(m.GetEndpoints()) > maxEndpoints:
		return fmt.Errorf("%d endpoints, accepted: up to %d", len(m.GetEndpoints()), maxEndpoints)
	case len(m.GetGpus()) > maxGPUs:
		return fmt.Errorf("%d GPUs, accepted: up to %d", len(m.GetGpus()), maxGPUs)
	}
	references := 0
	for _, e := range m.GetEndpoints() {
		references += len(e.GetGpus())
	}
	if references > maxReferences {
		return fmt.Errorf("endpoints on %d GPUs in all, accepted: up to %d", references, maxReferences)
	}
	if d.node == "" {
		if err := checkName(m.GetNode()); err != nil {
			return fmt.Errorf("node: %w", err)
		}
		d.node = m.GetNode()
	}
	d.sequence, d.any = m.GetSequence(), true
	if m.GetInventory() == nil {
		return nil
	}
	// Rows that follow a bad inventory must not be read by the one before it.
	var err error
	if d.inventory, err = decodeInventory(m.GetInventory()); err != nil {
		return fmt.Errorf("inventory: %w", err)
	}
	return nil
}

func decodeInventory(m *pushv1.Inventory) ([]names, error) {
	if len(m.GetItems()) > maxGPUs {
		return nil, fmt.Errorf("%d GPUs, accepted: up to %d", len(m.GetItems()), maxGPUs)
	}
	inventory := make([]names, 0, len(m.GetItems()))
	size := 0
	for _, item := range m.GetItems() {
		size += len(item.GetId()) + len(item.GetProfile()) + len(item.GetModel())
	}
	if size > maxInventory {
		return nil, fmt.Errorf("names of %d bytes, accepted: up to %d", size, maxInventory)
	}
	seen := make(map[string]bool, len(m.GetItems()))
	for _, item := range m.GetItems() {
		id := item.GetId()
		if err := checkName(id); err != nil {
			return nil, fmt.Errorf("GPU id: %w", err)
		}
		if seen[id] {
			return nil, fmt.Errorf("GPU %s is twice there", id)
		}
		seen[id] = true
		inventory = append(inventory, names{id, clip(item.GetProfile()), clip(item.GetModel())})
	}
	return inventory, nil
}

// checkName holds names to what the configuration accepts for a node.
func checkName(name string) error {
	switch {
	case name == "":
		return errors.New("is missing")
	case len(name) > maxName:
		return fmt.Errorf("has %d bytes, accepted: up to %d", len(name), maxName)
	case !utf8.ValidString(name) || strings.IndexFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0:
		return fmt.Errorf("%q is not printable text", clip(name))
	}
	return nil
}

var errCount = errors.New("number of values does not match the mask")

func (d *decoder) endpoint(m *pushv1.Endpoint, now time.Time) (u Update, rejected int, err error) {
	if u.Endpoint, err = netip.ParseAddrPort(m.GetAddress()); err != nil || u.Endpoint.Addr().Zone() != "" {
		return u, 0, errors.New("is not IP:port")
	}
	if len(m.GetGpus()) > len(d.inventory) {
		return u, 0, fmt.Errorf("on %d GPUs of %d", len(m.GetGpus()), len(d.inventory))
	}
	for _, i := range m.GetGpus() {
		if int64(i) >= int64(len(d.inventory)) {
			return u, 0, fmt.Errorf("on GPU %d, which is not in the inventory of %d", i, len(d.inventory))
		}
		u.GPUs = append(u.GPUs, d.inventory[i].id)
	}
	u.Err = clip(m.GetError())
	s := &u.Sample
	s.At = now.Add(-span(m.GetAgeUs()))
	if m.ChangedAgeUs != nil {
		// A change that is younger than the sample cannot be.
		s.Changed = now.Add(-max(span(m.GetChangedAgeUs()), span(m.GetAgeUs())))
	}
	rejected, err = decodeSample(m, s)
	return u, rejected, err
}

// decodeSample reads the numbers of a row. A value that cannot be true leaves
// its field unknown and zero.
func decodeSample(m *pushv1.Endpoint, s *telemetry.Sample) (rejected int, err error) {
	known, gauges, counters := m.GetKnown(), m.GetGauges(), m.GetCounters()
	bad := telemetry.Mask(0)
	for i := range sampleFields {
		f := &sampleFields[i]
		if known&(1<<f.wire) == 0 {
			continue
		}
		var v float64
		switch {
		case f.counter && len(counters) > 0:
			v, counters = counters[0], counters[1:]
		case !f.counter && len(gauges) > 0:
			v, gauges = float64(gauges[0]), gauges[1:]
		default:
			return 0, errCount
		}
		s.Known |= f.bit
		if !inRange(v, f.min, f.max) {
			bad |= f.bit
		}
		*f.at(s) = v
	}
	// Values of fields that this server doesn't know come last.
	if known&^knownSample == 0 && len(gauges)+len(counters) > 0 {
		return 0, errCount
	}
	if s.Known.Has(telemetry.HasXID) {
		if s.XID = int(m.GetXid()); m.GetXid() > maxXID {
			bad |= telemetry.HasXID
		}
	}
	if known&conditionBit != 0 {
		s.Known |= telemetry.HasCondition
		if c := m.GetCondition(); c < pushv1.Condition_CONDITION_OK || c > pushv1.Condition_CONDITION_LOST {
			bad |= telemetry.HasCondition
		} else {
			s.Condition = telemetry.Condition(c)
		}
	}
	rejected = bits.OnesCount64(known &^ knownSample)
	if bad != 0 {
		rejected += forget(s, bad)
	}
	return rejected, nil
}

// forget makes fields unknown and returns how many they were.
func forget(s *telemetry.Sample, bad telemetry.Mask) int {
	s.Known &^= bad
	for i := range sampleFields {
		if f := &sampleFields[i]; bad.Has(f.bit) {
			*f.at(s) = 0
		}
	}
	if bad.Has(telemetry.HasXID) {
		s.XID = 0
	}
	if bad.Has(telemetry.HasCondition) {
		s.Condition = 0
	}
	return bits.OnesCount32(uint32(bad))
}

// decodeGPU reads one row.
func decodeGPU(m *pushv1.GPU, of names, now time.Time) (telemetry.GPU, int, error) {
	g := telemetry.GPU{ID: of.id, Profile: of.profile, Model: of.model, At: now.Add(-span(m.GetAgeUs())), Lost: m.GetLost()}
	known, gauges := m.GetKnown(), m.GetGauges()
	bad := telemetry.GPUMask(0)
	for i := range gpuFields {
		f := &gpuFields[i]
		if known&(1<<f.wire) == 0 {
			continue
		}
		if len(gauges) == 0 {
			return g, 0, errCount
		}
		v := float64(gauges[0])
		gauges = gauges[1:]
		g.Known |= f.bit
		if !inRange(v, f.min, f.max) {
			bad |= f.bit
		}
		*f.at(&g) = v
	}
	if known&^knownGPU == 0 && len(gauges) > 0 {
		return g, 0, errCount
	}
	for _, f := range gpuScalars {
		if known&(1<<f.wire) == 0 {
			continue
		}
		if scalarGPU(m, &g, f.bit) {
			g.Known |= f.bit
		} else {
			bad |= f.bit
		}
	}
	for i := range gpuFields {
		if f := &gpuFields[i]; bad.Has(f.bit) {
			*f.at(&g) = 0
		}
	}
	g.Known &^= bad
	return g, bits.OnesCount32(uint32(bad)) + bits.OnesCount64(known&^knownGPU), nil
}

// scalarGPU reads one field with a place of its own; false leaves it zero.
func scalarGPU(m *pushv1.GPU, g *telemetry.GPU, bit telemetry.GPUMask) bool {
	switch bit {
	case telemetry.GPUHasEnergy:
		if !inRange(m.GetEnergyJoules(), 0, maxCounter) {
			return false
		}
		g.EnergyJoules = m.GetEnergyJoules()
	case telemetry.GPUHasThrottle:
		g.Throttle = telemetry.Throttle(m.GetThrottle())
	case telemetry.GPUHasXID:
		if m.GetXid() > maxXID || m.GetXidEvents() > maxCounter {
			return false
		}
		g.XID, g.XIDEvents = int(m.GetXid()), float64(m.GetXidEvents())
	case telemetry.GPUHasRecovery:
		// A number that this version doesn't know must not cost capacity.
		if m.GetRecovery() > uint32(telemetry.RecoverSystemReboot) {
			return false
		}
		g.Recovery = telemetry.RecoveryAction(m.GetRecovery())
	case telemetry.GPUHasDBE:
		if m.GetDoubleBitErrors() > maxCounter {
			return false
		}
		g.DBE = float64(m.GetDoubleBitErrors())
	case telemetry.GPUHasRemap:
		g.RemapFailed, g.RemapPending = m.GetRemapFailed(), m.GetRemapPending()
	}
	return true
}

// span reads an age; more than an hour is an hour.
func span(us uint64) time.Duration {
	return time.Duration(min(us, uint64(maxAge/time.Microsecond))) * time.Microsecond
}
