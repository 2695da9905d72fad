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
