package dcgm

import (
	"errors"
	"fmt"
	"time"
)

// engine is as much of DCGM as a reader needs. None of its methods but open may
// be called before open succeeded or after close, and no two at once.
type engine interface {
	// open connects to a host engine, or starts one inside this process.
	open(host) error
	// close ends the connection; groups and watches end with it.
	close() error
	// topology says which GPUs and MIG instances there are.
	topology() (topology, error)
	// group makes a set of entities.
	group(name string, members []entity) (groupRef, error)
	dropGroup(groupRef)
	// watch has DCGM sample fields of a group, and waits for their first samples.
	watch(group groupRef, name string, ids []fieldID, every, keepFor time.Duration, keep int) (watchRef, error)
	// rewatch ends a watch and begins it anew.
	rewatch(watchRef) error
	dropWatch(watchRef)
	// latest appends the cached samples of every field of every entity, in any
	// order. live asks the driver instead of the cache.
	latest(entities []entity, ids []fieldID, live bool, to []sample) ([]sample, error)
	// since appends a watch's samples from a stamp on, oldest first per entity.
	since(w watchRef, stamp int64, to []sample) ([]sample, error)
	// gpuStatus returns a GPU's DcgmEntityStatus.
	gpuStatus(gpu uint32) int
}

// groupRef and watchRef name what an engine made; 0 is none.
type (
	groupRef int
	watchRef int
)

// DcgmEntityStatusLost.
const statusLost = 4

// Return codes that a reader tells apart (dcgmReturn_t).
const (
	codeUninitialized  = -10
	codeTimeout        = -11
	codeConnectionGone = -21
	codePaused         = -54
	codeDriverTimeout  = -57
	codeDetached       = -67
)

// engineError is a failed DCGM call.
type engineError struct {
	doing string
	code  int // 0 where go-dcgm does not say
	text  string
}

func (e *engineError) Error() string {
	if e.code == 0 {
		return fmt.Sprintf("%s: %s", e.doing, e.text)
	}
	return fmt.Sprintf("%s: %s (%d)", e.doing, e.text, e.code)
}

// errNoGPU says that DCGM answers, but has no GPU to read.
var errNoGPU = errors.New("no GPU")

func causeOf(err error) Cause {
	if errors.Is(err, errNoGPU) {
		return CauseNoGPU
	}
	var e *engineError
	if !errors.As(err, &e) {
		return CauseOther
	}
	switch e.code {
	case codeConnectionGone, codeUninitialized:
		return CauseConnection
	case codeTimeout:
		return CauseTimeout
	case codePaused:
		return CausePaused
	case codeDriverTimeout:
		return CauseDriverTimeout
	case codeDetached:
		return CauseDetached
	}
	return CauseOther
}
