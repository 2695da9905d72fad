package dcgm

import (
	"math"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// fieldID is a DCGM field's number. Names changed in DCGM 4.6 (GPU_TEMP became
// GPU_TEMP_CELSIUS and so on), numbers never did.
type fieldID uint16

// slot is a field's place in the table and in an entity's tracks.
type slot uint8

// The fields that are read, by DCGM's names without DCGM_FI_.
const (
	slotName           slot = iota // DEV_GPU_NAME
	slotUUID                       // DEV_GPU_UUID
	slotMIGMode                    // DEV_MIG_MODE
	slotThrottle                   // DEV_CLOCKS_EVENT_REASONS
	slotMargin                     // DEV_GPU_TEMP_MARGIN_CELSIUS
	slotPowerAverage               // DEV_BOARD_POWER_WATTS, a mean over 1 s on most GPUs
	slotEnergy                     // DEV_TOTAL_ENERGY_CONSUMPTION, mJ since the driver was loaded
	slotPower                      // DEV_BOARD_POWER_RAW_WATTS, at this moment
	slotUtil                       // DEV_GPU_UTIL_RATIO, in percent despite its name
	slotXID                        // DEV_XID_ERROR
	slotMaxLinkGen                 // DEV_PCIE_MAX_LINK_GEN
	slotMaxLinkWidth               // DEV_PCIE_MAX_LINK_WIDTH
	slotLinkWidth                  // DEV_PCIE_LINK_WIDTH
	slotFBTotal                    // DEV_FB_TOTAL, MiB
	slotFBUsed                     // DEV_FB_USED, MiB
	slotFBReserved                 // DEV_FB_RESERVED, MiB
	slotDBE                        // DEV_ECC_DBE_VOL_TOTAL
	slotRemapFailed                // DEV_ROW_REMAP_FAILED
	slotRemapPending               // DEV_ROW_REMAP_PENDING
	slotGRActive                   // PROF_GR_ENGINE_UTIL_RATIO
	slotSMActive                   // PROF_SM_UTIL_RATIO
	slotTensorActive               // PROF_TENSOR_UTIL_RATIO
	slotDRAMActive                 // PROF_DRAM_UTIL_RATIO
	slotPCIeTX                     // PROF_PCIE_TX_BYTES, bytes per second over the interval
	slotPCIeRX                     // PROF_PCIE_RX_BYTES
	slotRecoveryAction             // DEV_GPU_RECOVERY_ACTION
	slots
)

// pidField is DCGM_FI_DEV_COMPUTE_PIDS. DCGM 4 moved it to its internal header
// (dcgm_fields_internal.hpp) but still watches it; DCGM appends one binary
// sample per process, dcgmRunningProcess_t, and none when there is no process.
const pidField fieldID = 221

// cadence is how often a field is sampled and read.
type cadence uint8

const (
	everyTick   cadence = iota + 1 // at the interval
	everySecond                    // sampled and read each second
	heartbeat                      // sampled each second, read at each tick
	event                          // appended by DCGM when it happens
	seldom                         // sampled every 30 s, read each second
)

// fieldSpec is what is known of a field beforehand.
type fieldSpec struct {
	id       fieldID
	cadence  cadence
	min, max float64 // what a value may be; outside it the sample is refused
}

// anything is the gate of fields that are text.
var anything = math.Inf(1)

// The gates. Activity ratios get a little room above 1, as sampling windows do
// not match exactly; the value is then 1. GPU_UTIL was seen above 100, up to
// 2^32-1 (DCGM issue 199, dcgm-exporter issue 418), and is refused there. Power:
// a board of 2026 draws up to 1.4 kW, so 10 kW is no reading. Energy at 10 kW for
// ten years stays below 10^16 mJ. Framebuffer: 16 TiB. PCIe: 1 TB/s, four times a
// 16-lane link of generation 6 and 7. Recovery actions: those that have a
// meaning, because an unknown number must not cost capacity.
var fields = [slots]fieldSpec{
	slotName:           {50, seldom, 0, anything},
	slotUUID:           {54, seldom, 0, anything},
	slotMIGMode:        {67, everySecond, 0, 1},
	slotThrottle:       {112, everyTick, 0, 1<<32 - 1},
	slotMargin:         {153, everyTick, -100, 200},
	slotPowerAverage:   {155, everyTick, 0, 10_000},
	slotEnergy:         {156, heartbeat, 0, 1e16},
	slotPower:          {157, everyTick, 0, 10_000},
	slotUtil:           {203, everyTick, 0, 100},
	slotXID:            {230, event, 0, 100_000},
	slotMaxLinkGen:     {235, seldom, 1, 16},
	slotMaxLinkWidth:   {236, seldom, 1, 32},
	slotLinkWidth:      {238, seldom, 1, 32},
	slotFBTotal:        {250, everyTick, 0, 1 << 24},
	slotFBUsed:         {252, everyTick, 0, 1 << 24},
	slotFBReserved:     {253, everyTick, 0, 1 << 24},
	slotDBE:            {311, everySecond, 0, 1e12},
	slotRemapFailed:    {395, everySecond, 0, 1},
	slotRemapPending:   {396, everySecond, 0, 1},
	slotGRActive:       {1001, everyTick, 0, 1.05},
	slotSMActive:       {1002, everyTick, 0, 1.05},
	slotTensorActive:   {1004, everyTick, 0, 1.05},
	slotDRAMActive:     {1005, everyTick, 0, 1.05},
	slotPCIeTX:         {1009, everyTick, 0, 1e12},
	slotPCIeRX:         {1010, everyTick, 0, 1e12},
	slotRecoveryAction: {1523, everySecond, 0, float64(telemetry.RecoverSystemReboot)},
}

// slotOf finds a field's slot by its number.
var slotOf = func() map[fieldID]slot {
	m := make(map[fieldID]slot, slots)
	for i := range fields {
		m[fields[i].id] = slot(i)
	}
	return m
}()

const (
	slowPeriod   = time.Second
	seldomPeriod = 30 * time.Second
	pidPeriod    = 5 * time.Second
	// xidSamples is how many XIDs of a GPU DCGM keeps, so that several within a
	// second are all seen: the newest hides the others (DCGM issue 235).
	xidSamples = 16
	xidKeep    = 5 * time.Minute
)

// period is how often DCGM samples a field of that cadence.
func (c cadence) period(interval time.Duration) time.Duration {
	switch c {
	case everyTick:
		return interval
	case seldom:
		return seldomPeriod
	default:
		return max(slowPeriod, interval)
	}
}

// maxAge is how old a value may be and still be known: a second for what is
// sampled at the interval, else three periods.
func (c cadence) maxAge(interval time.Duration) time.Duration {
	return max(time.Second, 3*c.period(interval))
}

// entityKind is what fields an entity has.
type entityKind uint8

const (
	wholeGPU    entityKind = iota + 1
	parentGPU              // of MIG instances, or ready for some
	gpuInstance            // a MIG instance
)

// watchSpec is one set of fields that DCGM samples alike.
type watchSpec struct {
	name  string
	slots []slot
	// keep is how many samples DCGM keeps of each field.
	keep    int
	keepFor time.Duration
}

// Profiling fields stand apart, since DCGM refuses a whole set when it refuses
// one of its fields: without rights, or on GPUs that can't, only they are
// missing.
var (
	deviceSlots   = []slot{slotThrottle, slotMargin, slotPowerAverage, slotPower, slotUtil, slotFBTotal, slotFBUsed, slotFBReserved}
	profileSlots  = []slot{slotGRActive, slotSMActive, slotTensorActive, slotDRAMActive, slotPCIeTX, slotPCIeRX}
	levelSlots    = []slot{slotRecoveryAction, slotDBE, slotRemapFailed, slotRemapPending, slotMIGMode}
	identitySlots = []slot{slotUUID, slotName, slotMaxLinkGen, slotMaxLinkWidth, slotLinkWidth}
)

var watchSpecs = [...][]watchSpec{
	wholeGPU: {
		{name: "device", slots: deviceSlots},
		{name: "profile", slots: profileSlots},
		{name: "heartbeat", slots: []slot{slotEnergy}},
		{name: "level", slots: levelSlots},
		{name: "xid", slots: []slot{slotXID}, keep: xidSamples, keepFor: xidKeep},
		{name: "identity", slots: identitySlots},
	},
	// Under MIG a GPU's own utilisation and profiling values belong to no one;
	// what its instances share is read: power, heat, link, health.
	parentGPU: {
		{name: "device", slots: []slot{slotThrottle, slotMargin, slotPowerAverage, slotPower}},
		{name: "profile", slots: []slot{slotPCIeTX, slotPCIeRX}},
		{name: "heartbeat", slots: []slot{slotEnergy}},
		{name: "level", slots: levelSlots},
		{name: "xid", slots: []slot{slotXID}, keep: xidSamples, keepFor: xidKeep},
		{name: "identity", slots: identitySlots},
	},
	gpuInstance: {
		{name: "device", slots: []slot{slotFBTotal, slotFBUsed, slotFBReserved}},
		{name: "profile", slots: []slot{slotGRActive, slotSMActive, slotTensorActive, slotDRAMActive}},
	},
}

// linkBandwidth returns the bytes per second that a PCIe link carries one way:
// transfers per second and lane, eight to a byte, times the lanes, less the
// encoding. Sources: PCI Express Base Specification 2.1 (8b/10b at 2.5 and 5
// GT/s), 3.0 to 5.0 (128b/130b at 8, 16 and 32 GT/s), 6.0 (256-byte flits with
// 236 bytes of packets at 64 GT/s). It is 0 for generations beyond, and go-dcgm's
// own table is not used because it is 0 for generation 5.
func linkBandwidth(generation, lanes int) float64 {
	const giga = 1e9
	perLane := 0.0
	switch generation {
	case 1:
		perLane = 2.5 * giga * 8 / 10
	case 2:
		perLane = 5 * giga * 8 / 10
	case 3:
		perLane = 8 * giga * 128 / 130
	case 4:
		perLane = 16 * giga * 128 / 130
	case 5:
		perLane = 32 * giga * 128 / 130
	case 6:
		perLane = 64 * giga * 236 / 256
	}
	return perLane / 8 * float64(lanes)
}
