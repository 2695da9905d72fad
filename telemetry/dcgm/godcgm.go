//go:build dcgm && cgo && linux

package dcgm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
)

// New returns a source that reads through go-dcgm. It starts nothing and calls
// nothing in DCGM; a missing libdcgm.so.4 is found, and waited for, by Run.
func New(o Options) (*Source, error) { return newSource(o, func() engine { return &goDCGM{} }) }

// goDCGM is DCGM through go-dcgm. Every method checks that the connection is
// open: go-dcgm calls symbols that are found only once libdcgm is loaded, and a
// call before that ends the process with exit status 127. So does a call that
// the library lacks; those made here are older than libdcgm.so.4.
type goDCGM struct {
	isOpen  bool
	opened  int // counts connections, for names that are not there yet
	groups  []dcgm.GroupHandle
	watches []watching

	pairs []dcgm.GroupEntityPair
	ids   []dcgm.Short
}

// watching is what a watch was made with.
type watching struct {
	fields   dcgm.FieldHandle
	group    dcgm.GroupHandle
	everyUs  int64
	keepSecs float64
	keep     int32
}

var errNotOpen = errors.New("no connection to DCGM")

// failure turns an error of go-dcgm into an engineError. Only some of its errors
// carry DCGM's code.
func failure(doing string, err error) error {
	e := &engineError{doing: doing, text: err.Error()}
	var coded *dcgm.Error
	if errors.As(err, &coded) {
		e.code = int(coded.Code)
	} else if strings.Contains(e.text, "connection invalid") {
		// errorString of DCGM_ST_CONNECTION_NOT_VALID; these calls keep only it.
		e.code = codeConnectionGone
	}
	return e
}

func (g *goDCGM) open(h host) error {
	var err error
	if h.embedded {
		_, err = dcgm.Init(dcgm.Embedded)
	} else {
		_, err = dcgm.Init(dcgm.Standalone, h.args...)
	}
	if err != nil {
		if strings.Contains(err.Error(), "libdcgm.so.4 not found") {
			return fmt.Errorf("%w: install DCGM 4 on this node, or set LD_LIBRARY_PATH to where the library is", err)
		}
		return err
	}
	g.isOpen = true
	g.opened++
	g.groups, g.watches = g.groups[:0], g.watches[:0]
	return nil
}

func (g *goDCGM) close() error {
	if !g.isOpen {
		return errNotOpen
	}
	g.isOpen = false
	return dcgm.Shutdown()
}

func (g *goDCGM) topology() (topology, error) {
	var t topology
	if !g.isOpen {
		return t, errNotOpen
	}
	// All GPUs, also those that are lost: the list of supported ones leaves them
	// out.
	gpus, err := dcgm.GetEntityGroupEntities(dcgm.FE_GPU)
	if err != nil {
		return t, failure("list GPUs", err)
	}
	for _, id := range gpus {
		switch dcgm.GetGPUStatus(id) {
		case dcgm.EntityStatusUnsupported, dcgm.EntityStatusInaccessible, dcgm.EntityStatusDisabled:
			continue // not this process's to read
		}
		t.gpus = append(t.gpus, uint32(id))
	}
	hierarchy, err := dcgm.GetGPUInstanceHierarchy()
	if err != nil {
		return t, failure("list MIG instances", err)
	}
	for i := range min(hierarchy.Count, uint(len(hierarchy.EntityList))) {
		info := &hierarchy.EntityList[i]
		if info.Entity.EntityGroupId != dcgm.FE_GPU_I {
			continue
		}
		t.instances = append(t.instances, instance{
			id: uint32(info.Entity.EntityId), gpu: uint32(info.Parent.EntityId),
			uuid: info.Info.GpuUuid, nvml: info.Info.NvmlInstanceId,
			shape: [2]uint{info.Info.NvmlMigProfileId, info.Info.NvmlProfileSlices},
		})
	}
	return t, nil
}

// name makes a name that no other client of the host engine has.
func (g *goDCGM) name(what string) string {
	return fmt.Sprintf("fairlead-%d-%d-%d-%s", os.Getpid(), g.opened, len(g.watches), what)
}

func (g *goDCGM) group(name string, members []entity) (groupRef, error) {
	if !g.isOpen {
		return 0, errNotOpen
	}
	handle, err := dcgm.CreateGroup(g.name(name))
	if err != nil {
		return 0, failure("create group", err)
	}
	for _, m := range members {
		if err := dcgm.AddEntityToGroup(handle, dcgm.Field_Entity_Group(m.group), uint(m.id)); err != nil {
			_ = dcgm.DestroyGroup(handle)
			return 0, failure("add to group", err)
		}
	}
	g.groups = append(g.groups, handle)
	return groupRef(len(g.groups)), nil
}

func (g *goDCGM) dropGroup(ref groupRef) {
	if g.isOpen && ref > 0 {
		_ = dcgm.DestroyGroup(g.groups[ref-1])
	}
}

func (g *goDCGM) watch(group groupRef, name string, ids []fieldID, every, keepFor time.Duration, keep int) (watchRef, error) {
	if !g.isOpen {
		return 0, errNotOpen
	}
	short := make([]dcgm.Short, len(ids)) // never empty: go-dcgm takes the address of its first
	for i, id := range ids {
		short[i] = dcgm.Short(id)
	}
	handle, err := dcgm.FieldGroupCreate(g.name(name), short)
	if err != nil {
		return 0, failure("create field group", err)
	}
	w := watching{fields: handle, group: g.groups[group-1], everyUs: every.Microseconds(), keepSecs: keepFor.Seconds(), keep: int32(keep)}
	if err := g.begin(w); err != nil {
		_ = dcgm.UnwatchFields(w.fields, w.group)
		_ = dcgm.FieldGroupDestroy(handle)
		return 0, failure("watch fields", err)
	}
	g.watches = append(g.watches, w)
	return watchRef(len(g.watches)), nil
}

func (g *goDCGM) begin(w watching) error {
	return dcgm.WatchFieldsWithGroupEx(w.fields, w.group, w.everyUs, w.keepSecs, w.keep)
}

func (g *goDCGM) rewatch(ref watchRef) error {
	if !g.isOpen {
		return errNotOpen
	}
	w := g.watches[ref-1]
	// It may have ended by itself, or by an attempt that got no further.
	_ = dcgm.UnwatchFields(w.fields, w.group)
	if err := g.begin(w); err != nil {
		return failure("watch fields", err)
	}
	return nil
}

func (g *goDCGM) dropWatch(ref watchRef) {
	if !g.isOpen || ref == 0 {
		return
	}
	w := &g.watches[ref-1]
	_ = dcgm.UnwatchFields(w.fields, w.group)
	_ = dcgm.FieldGroupDestroy(w.fields)
}

func (g *goDCGM) latest(entities []entity, ids []fieldID, live bool, to []sample) ([]sample, error) {
	if !g.isOpen {
		return to, errNotOpen
	}
	g.pairs, g.ids = g.pairs[:0], g.ids[:0]
	for _, e := range entities {
		g.pairs = append(g.pairs, dcgm.GroupEntityPair{EntityGroupId: dcgm.Field_Entity_Group(e.group), EntityId: uint(e.id)})
	}
	for _, id := range ids {
		g.ids = append(g.ids, dcgm.Short(id))
	}
	flags := uint(0)
	if live {
		flags = 1 // DCGM_FV_FLAG_LIVE_DATA
	}
	for part := range slices.Chunk(g.pairs, max(1, valuesPerCall/len(ids))) {
		values, err := dcgm.EntitiesGetLatestValues(part, g.ids, flags)
		if err != nil {
			return to, failure("read values", err)
		}
		to = appendSamples(to, values)
	}
	return to, nil
}

// valuesPerCall is up to how many values go-dcgm reuses the memory that a call
// fills, a megabyte then; a MIG node of eight GPUs has more in a tick.
const valuesPerCall = 256

func (g *goDCGM) since(ref watchRef, stamp int64, to []sample) ([]sample, error) {
	if !g.isOpen {
		return to, errNotOpen
	}
	w := &g.watches[ref-1]
	// The zero time.Time would be sent as the year 1.
	values, _, err := dcgm.GetValuesSince(w.group, w.fields, time.UnixMicro(stamp))
	if err != nil {
		return to, failure("read values since", err)
	}
	return appendSamples(to, values), nil
}

func (g *goDCGM) gpuStatus(gpu uint32) int {
	if !g.isOpen {
		return int(dcgm.EntityStatusUnknown)
	}
	return int(dcgm.GetGPUStatus(uint(gpu)))
}

// appendSamples takes what is needed of the values, by index: each is a struct of
// four kilobytes, and go-dcgm's accessors copy it whole.
func appendSamples(to []sample, values []dcgm.FieldValue_v2) []sample {
	for i := range values {
		v := &values[i]
		s := sample{
			entity: entity{group: uint8(v.EntityGroupId), id: uint32(v.EntityID)},
			field:  fieldID(v.FieldID),
			kind:   byte(v.FieldType),
			status: v.Status,
			stamp:  v.TS,
			bits:   binary.NativeEndian.Uint64(v.Value[:8]),
		}
		switch s.kind {
		case typeText:
			if v.StringValue != nil {
				s.text = *v.StringValue
			}
		case typeBinary:
			s.process(v.Value[:16])
		}
		to = append(to, s)
	}
	return to
}
