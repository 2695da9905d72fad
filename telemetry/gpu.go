package telemetry

import (
	"math"
	"time"
)

// GPUMask says which fields of a [GPU] are known.
type GPUMask uint32

// Fields of a GPU.
const (
	GPUHasUtil GPUMask = 1 << iota
	GPUHasGRActive
	GPUHasSMActive
	GPUHasTensorActive
	GPUHasDRAMActive
	GPUHasFBUsed
	GPUHasFBTotal
	GPUHasPower
	GPUHasEnergy
	GPUHasTemperatureMargin
	GPUHasThrottle
	GPUHasPCIe
	GPUHasPCIeLink
	GPUHasXID
	GPUHasRecovery
	GPUHasDBE
	GPUHasRemap
)

// Has reports whether all fields of f are known.
func (m GPUMask) Has(f GPUMask) bool { return m&f == f }

// GPU is what a GPU, or one MIG instance of a GPU, said at one moment.
type GPU struct {
	// ID is the GPU's UUID ("GPU-8a3b…"); a MIG instance adds "/" and NVML's
	// instance id ("GPU-8a3b…/3"). Instance ids are dealt anew when MIG is
	// reconfigured, so Profile belongs to a MIG instance's identity.
	ID      string
	Profile string // MIG profile such as "1g.10gb"; "" for a whole GPU
	Model   string // such as "NVIDIA H100 80GB HBM3"; "" if unknown
	// At is the local arrival of the newest value that counts, with its
	// monotonic reading. Values that are older than they may be are not Known.
	At    time.Time
	Known GPUMask

	Util         float64 // 0…1; NVML's, a mean over up to 1 s
	GRActive     float64 // 0…1; the one to use under MIG
	SMActive     float64 // 0…1
	TensorActive float64 // 0…1
	DRAMActive   float64 // 0…1
	FBUsedMiB    float64
	FBTotalMiB   float64 // without what the driver reserves, where known
	PowerWatts   float64
	EnergyJoules float64 // counter since the driver was loaded
	// TemperatureMargin is the distance to slowdown in °C; small or negative is
	// hot.
	TemperatureMargin float64
	Throttle          Throttle
	PCIeTX, PCIeRX    float64 // bytes per second, from the GPU's view
	PCIeLink          float64 // bytes per second that the link can carry one way
	// XID is the last XID code, 0 for none; XIDEvents counts the XIDs seen since
	// the source began, repeats of one code included.
	XID       int
	XIDEvents float64
	Recovery  RecoveryAction
	DBE       float64 // volatile double-bit ECC errors, counter
	// RemapFailed and RemapPending are the row-remapping flags.
	RemapFailed, RemapPending bool
	// Lost is true when the driver has lost the GPU; nothing else is known then.
	Lost bool
}

// Throttle is DCGM's bitmask of clock throttle reasons (field 112).
type Throttle uint32

// Throttle reasons that cost capacity; the software power cap (0x4) is normal
// at full load and is not among them.
const (
	ThrottleHWSlowdown   Throttle = 0x8
	ThrottleSWThermal    Throttle = 0x20
	ThrottleHWThermal    Throttle = 0x40
	ThrottleHWPowerBrake Throttle = 0x80
	ThrottleHarmful               = ThrottleHWSlowdown | ThrottleSWThermal | ThrottleHWThermal | ThrottleHWPowerBrake
)

// RecoveryAction is what the driver says must be done to a GPU (DCGM field
// 1523, NVML's nvmlDeviceGetGpuRecoveryAction).
type RecoveryAction uint8

// Recovery actions, by their number in NVML.
const (
	RecoverNone RecoveryAction = iota
	RecoverGPUReset
	RecoverReboot
	RecoverDrainP2P
	RecoverDrainAndReset
	RecoverIMEX
	RecoverBusReset
	RecoverSystemReboot
	recoveryActions
)

// Condition is how well a GPU is, as a level: it holds for as long as it is
// said, unlike an XID, which is an event. Higher is worse.
type Condition uint8

// Conditions.
const (
	ConditionOK    Condition = iota + 1
	ConditionDrain           // usable now; needs a reset at leisure
	ConditionEject           // needs a reset or a reboot before it can be trusted
	ConditionLost            // the driver has lost it
)

func (c Condition) String() string {
	names := [...]string{"unknown", "ok", "drain", "eject", "lost"}
	if int(c) >= len(names) {
		c = 0
	}
	return names[c]
}

// Condition judges the level signals: recovery action 1, 2, 4, 6 and 7 need the
// GPU out, 3 and 5 a drain; a failed row remap needs it out, a pending one a
// drain. It is 0 when none of them is known; an action of a number that NVML
// does not have yet tells nothing, since it must not cost capacity unread.
func (g *GPU) Condition() Condition {
	c := Condition(0)
	if g.Lost {
		return ConditionLost
	}
	if g.Known.Has(GPUHasRecovery) {
		switch {
		case g.Recovery == RecoverNone:
			c = ConditionOK
		case g.Recovery == RecoverDrainP2P || g.Recovery == RecoverIMEX:
			c = ConditionDrain
		case g.Recovery < recoveryActions:
			c = ConditionEject
		}
	}
	if g.Known.Has(GPUHasRemap) {
		switch {
		case g.RemapFailed:
			c = ConditionEject
		case g.RemapPending:
			c = max(c, ConditionDrain)
		default:
			c = max(c, ConditionOK)
		}
	}
	return c
}

// PCIeShare is the busier direction's share of the link, 0…1, or false where
// rate or link is unknown.
func (g *GPU) PCIeShare() (float64, bool) {
	if !g.Known.Has(GPUHasPCIe|GPUHasPCIeLink) || g.PCIeLink <= 0 {
		return 0, false
	}
	return min(1, max(g.PCIeTX, g.PCIeRX)/g.PCIeLink), true
}

// SetGPUs writes the GPUs that serve one endpoint into its sample, replacing
// what was known of them: of each number the worst, since the slowest and
// fullest of a tensor-parallel group bounds it. Framebuffer totals come from
// the GPU whose share in use is largest. XIDEvents counts those of the GPUs whose
// last code is of the gravest class, so that a harmless event on one GPU does not
// pass for the grave one that another has shown for long. Lost GPUs give no
// numbers, only the condition. Nothing is known of an empty list.
func (s *Sample) SetGPUs(gpus []GPU) {
	s.Known &^= gpuFields
	s.GPUUtil, s.GRActive, s.DRAMActive, s.PCIeShare, s.PowerWatts = 0, 0, 0, 0, 0
	s.FBUsedMiB, s.FBTotalMiB, s.XID, s.XIDEvents, s.Condition = 0, 0, 0, 0, 0
	fullest := -1.0
	for i := range gpus {
		g := &gpus[i]
		if c := g.Condition(); c != 0 {
			s.Condition = max(s.Condition, c)
			s.Known |= HasCondition
		}
		if g.Lost {
			continue
		}
		s.worst(g.Known.Has(GPUHasUtil), g.Util, &s.GPUUtil, HasGPUUtil)
		s.worst(g.Known.Has(GPUHasGRActive), g.GRActive, &s.GRActive, HasGRActive)
		s.worst(g.Known.Has(GPUHasDRAMActive), g.DRAMActive, &s.DRAMActive, HasDRAMActive)
		s.worst(g.Known.Has(GPUHasPower), g.PowerWatts, &s.PowerWatts, HasPower)
		share, ok := g.PCIeShare()
		s.worst(ok, share, &s.PCIeShare, HasPCIe)
		s.fullestOf(g, &fullest)
		s.addXID(g)
	}
}

// TakeGPU replaces what the sample knows of its GPUs by what another knows.
func (s *Sample) TakeGPU(from *Sample) {
	s.Known = s.Known&^gpuFields | from.Known&gpuFields
	s.GPUUtil, s.GRActive, s.DRAMActive = from.GPUUtil, from.GRActive, from.DRAMActive
	s.PCIeShare, s.PowerWatts = from.PCIeShare, from.PowerWatts
	s.FBUsedMiB, s.FBTotalMiB = from.FBUsedMiB, from.FBTotalMiB
	s.XID, s.XIDEvents, s.Condition = from.XID, from.XIDEvents, from.Condition
}

// worst keeps the larger of a number and what is known of it.
func (s *Sample) worst(known bool, v float64, to *float64, has Mask) {
	if known && !math.IsNaN(v) {
		*to = max(*to, v)
		s.Known |= has
	}
}

// fullestOf keeps the framebuffer of the GPU with the largest share in use. One
// whose total is unknown counts only beside others like it.
func (s *Sample) fullestOf(g *GPU, fullest *float64) {
	if !g.Known.Has(GPUHasFBUsed) || math.IsNaN(g.FBUsedMiB) {
		return
	}
	total := g.Known.Has(GPUHasFBTotal) && g.FBTotalMiB > 0
	full := g.FBUsedMiB
	switch {
	case total:
		full /= g.FBTotalMiB
	case s.Known.Has(HasFBTotal):
		return
	}
	if full <= *fullest && total == s.Known.Has(HasFBTotal) {
		return
	}
	*fullest = full
	s.FBUsedMiB, s.FBTotalMiB = g.FBUsedMiB, 0
	s.Known |= HasFBUsed
	if total {
		s.FBTotalMiB = g.FBTotalMiB
		s.Known |= HasFBTotal
	}
}

// addXID keeps the gravest code, and the events of the GPUs in its class.
func (s *Sample) addXID(g *GPU) {
	if !g.Known.Has(GPUHasXID) {
		return
	}
	class, worst := ClassifyXID(g.XID), ClassifyXID(s.XID)
	switch {
	case !s.Known.Has(HasXID) || class > worst:
		s.XID, s.XIDEvents = g.XID, g.XIDEvents
	case class == worst:
		s.XID = max(s.XID, g.XID)
		s.XIDEvents += g.XIDEvents
	}
	s.Known |= HasXID
}

func graverXID(a, b int) bool {
	ca, cb := ClassifyXID(a), ClassifyXID(b)
	return ca > cb || ca == cb && a > b
}

// GPUFrame is what one node's GPUs said at one moment.
type GPUFrame struct {
	At time.Time // local arrival
	// Epoch counts the source's connections to its GPUs: counters and watches
	// begin anew with each.
	Epoch uint32
	GPUs  []GPU
	// Processes maps a process id to the ids of the GPUs it computes on; nil
	// where the source can't tell.
	Processes map[int][]string
	// Err says why the GPUs could not be read, if they could not.
	Err error
}
