package push

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// maxText bounds every reason that crosses the wire, in bytes.
const maxText = 256

// encoder writes the frames of one stream. The inventory of GPUs goes with the
// first frame and again when it changes.
type encoder struct {
	items []*pushv1.Inventory_Item // as last sent
	index map[string]uint32        // by id
	last  time.Time                // when the frame before was made
}

// encode writes f as it is at now: all ages count from there. What is over the
// server's limits is left out, and the frame says so.
func (e *encoder) encode(f *Frame, sequence, dropped uint64, now time.Time) *pushv1.Frame {
	f = within(f)
	m := &pushv1.Frame{
		Epoch:    f.Epoch,
		Sequence: sequence,
		Dropped:  dropped,
		Error:    clip(f.Err),
	}
	if e.index == nil {
		m.Node = f.Node
	}
	if !e.last.IsZero() {
		m.IntervalUs = micros(f.At.Sub(e.last))
	}
	e.last = f.At
	items, index := inventory(f)
	if e.index == nil || !slices.EqualFunc(items, e.items, sameItem) {
		m.Inventory = &pushv1.Inventory{Items: items}
	}
	e.items, e.index = items, index
	m.Endpoints = make([]*pushv1.Endpoint, len(f.Endpoints))
	for i := range f.Endpoints {
		m.Endpoints[i] = e.endpoint(&f.Endpoints[i], f.At, now)
	}
	m.Gpus = make([]*pushv1.GPU, len(f.GPUs))
	for i := range f.GPUs {
		m.Gpus[i] = e.gpu(&f.GPUs[i], f.At, now)
	}
	if size := proto.Size(m); size > maxMessage {
		*e = encoder{last: e.last} // the inventory was not sent
		return &pushv1.Frame{Node: f.Node, Epoch: f.Epoch, Sequence: sequence, Dropped: dropped,
			Error: fmt.Sprintf("a frame takes up to %d bytes, this one would take %d", maxMessage, size)}
	}
	return m
}

// within returns f, or as much of it as a frame may hold.
func within(f *Frame) *Frame {
	if len(f.Endpoints) <= maxEndpoints && len(f.GPUs) <= maxGPUs {
		return f
	}
	part := *f
	part.Err = fmt.Sprintf("a frame holds %d endpoints and %d GPUs, found %d and %d; %s", maxEndpoints, maxGPUs, len(f.Endpoints), len(f.GPUs), f.Err)
	part.Endpoints = f.Endpoints[:min(len(f.Endpoints), maxEndpoints)]
	part.GPUs = f.GPUs[:min(len(f.GPUs), maxGPUs)]
	return &part
}

// inventory lists the frame's GPUs, and those that only its endpoints name. The
// wire takes no invalid UTF-8.
func inventory(f *Frame) (items []*pushv1.Inventory_Item, index map[string]uint32) {
	items = make([]*pushv1.Inventory_Item, 0, len(f.GPUs))
	index = make(map[string]uint32, len(f.GPUs))
	add := func(id, profile, model string) {
		if _, ok := index[id]; ok || len(items) == maxGPUs {
			return
		}
		index[id] = uint32(len(items))
		items = append(items, &pushv1.Inventory_Item{Id: clip(id), Profile: clip(profile), Model: clip(model)})
	}
	for i := range f.GPUs {
		g := &f.GPUs[i]
		add(g.ID, g.Profile, g.Model)
	}
	for i := range f.Endpoints {
		for _, id := range f.Endpoints[i].GPUs {
			add(id, "", "")
		}
	}
	return items, index
}

func sameItem(a, b *pushv1.Inventory_Item) bool {
	return a.Id == b.Id && a.Profile == b.Profile && a.Model == b.Model
}

func (e *encoder) endpoint(u *Update, frameAt, now time.Time) *pushv1.Endpoint {
	s := &u.Sample
	m := &pushv1.Endpoint{
		Address: u.Endpoint.String(),
		AgeUs:   age(s.At, frameAt, now),
		Error:   clip(u.Err),
	}
	if !s.Changed.IsZero() {
		changed := micros(now.Sub(s.Changed))
		m.ChangedAgeUs = &changed
	}
	for _, id := range u.GPUs {
		if i, ok := e.index[id]; ok {
			m.Gpus = append(m.Gpus, i)
		}
	}
	for i := range sampleFields {
		f := &sampleFields[i]
		if !s.Known.Has(f.bit) {
			continue
		}
		m.Known |= 1 << f.wire
		if f.counter {
			m.Counters = append(m.Counters, *f.at(s))
		} else {
			m.Gauges = append(m.Gauges, float32(*f.at(s)))
		}
	}
	if s.Known.Has(telemetry.HasXID) {
		m.Xid = code(s.XID)
	}
	if s.Known.Has(telemetry.HasCondition) {
		m.Known |= conditionBit
		m.Condition = pushv1.Condition(s.Condition)
	}
	return m
}

func (e *encoder) gpu(g *telemetry.GPU, frameAt, now time.Time) *pushv1.GPU {
	m := &pushv1.GPU{Index: e.index[g.ID], AgeUs: age(g.At, frameAt, now), Lost: g.Lost}
	for i := range gpuFields {
		if f := &gpuFields[i]; g.Known.Has(f.bit) {
			m.Known |= 1 << f.wire
			m.Gauges = append(m.Gauges, float32(*f.at(g)))
		}
	}
	for _, f := range gpuScalars {
		if !g.Known.Has(f.bit) {
			continue
		}
		m.Known |= 1 << f.wire
		switch f.bit {
		case telemetry.GPUHasEnergy:
			m.EnergyJoules = g.EnergyJoules
		case telemetry.GPUHasThrottle:
			m.Throttle = uint32(g.Throttle)
		case telemetry.GPUHasXID:
			m.Xid, m.XidEvents = code(g.XID), count(g.XIDEvents)
		case telemetry.GPUHasRecovery:
			m.Recovery = uint32(g.Recovery)
		case telemetry.GPUHasDBE:
			m.DoubleBitErrors = count(g.DBE)
		case telemetry.GPUHasRemap:
			m.RemapFailed, m.RemapPending = g.RemapFailed, g.RemapPending
		}
	}
	return m
}

// age is how old what was seen at that moment is now; a moment that was not
// given is the frame's.
func age(at, frameAt, now time.Time) uint64 {
	if at.IsZero() {
		at = frameAt
	}
	return micros(now.Sub(at))
}

// micros never returns a negative age: a sample cannot be of the future.
func micros(d time.Duration) uint64 { return uint64(max(0, d.Microseconds())) }

// code keeps a negative XID, which does not exist, out of range.
func code(xid int) uint32 {
	if xid < 0 || xid > maxXID {
		return maxXID + 1
	}
	return uint32(xid)
}

// clip makes text fit for logs and pages: valid UTF-8 of at most maxText bytes
// without control characters.
func clip(text string) string {
	if len(text) > maxText {
		text = text[:maxText]
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, ""))
}
