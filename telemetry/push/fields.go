package push

import (
	"math"

	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// sampleField maps one number of a [telemetry.Sample] to the wire.
type sampleField struct {
	bit     telemetry.Mask
	wire    pushv1.SampleField
	counter bool // travels as a double, else as a float
	min     float64
	max     float64
	at      func(*telemetry.Sample) *float64
}

// gpuField maps one gauge of a [telemetry.GPU] to the wire.
type gpuField struct {
	bit  telemetry.GPUMask
	wire pushv1.GPUField
	min  float64
	max  float64
	at   func(*telemetry.GPU) *float64
}

// Bounds of what can be true. Blank values of DCGM (0x7ffffff0 and up for
// integers, 1.4e14 for floats) lie outside; so does nothing that hardware of
// the next years can say.
const (
	maxCounter  = 1e14
	maxRequests = 1e6
	maxTokens   = 1e10
	maxMiB      = 1 << 22 // 4 TiB
	maxWatts    = 1e4
	maxXID      = 1e4
	maxRate     = 1e13 // bytes per second
	maxCelsius  = 500
)

// sampleFields is in ascending order of the wire's numbers: that is the order
// of values in a row. Fields with two values have two lines.
var sampleFields = []sampleField{
	{telemetry.HasKVUsage, pushv1.SampleField_SAMPLE_FIELD_KV_USAGE, false, 0, 1, func(s *telemetry.Sample) *float64 { return &s.KVUsage }},
	{telemetry.HasRunning, pushv1.SampleField_SAMPLE_FIELD_RUNNING, false, 0, maxRequests, func(s *telemetry.Sample) *float64 { return &s.Running }},
	{telemetry.HasWaiting, pushv1.SampleField_SAMPLE_FIELD_WAITING, false, 0, maxRequests, func(s *telemetry.Sample) *float64 { return &s.Waiting }},
	{telemetry.HasKVTokens, pushv1.SampleField_SAMPLE_FIELD_KV_TOKENS, false, 1, maxTokens, func(s *telemetry.Sample) *float64 { return &s.KVTokens }},
	{telemetry.HasMaxSeqs, pushv1.SampleField_SAMPLE_FIELD_MAX_SEQS, false, 1, maxRequests, func(s *telemetry.Sample) *float64 { return &s.MaxSeqs }},
	{telemetry.HasQueuedTokens, pushv1.SampleField_SAMPLE_FIELD_QUEUED_TOKENS, false, 0, maxTokens, func(s *telemetry.Sample) *float64 { return &s.QueuedTokens }},
	{telemetry.HasPromptTokens, pushv1.SampleField_SAMPLE_FIELD_PROMPT_TOKENS, true, 0, maxCounter, func(s *telemetry.Sample) *float64 { return &s.PromptTokens }},
	{telemetry.HasGenerationTokens, pushv1.SampleField_SAMPLE_FIELD_GENERATION_TOKENS, true, 0, maxCounter, func(s *telemetry.Sample) *float64 { return &s.GenerationTokens }},
	{telemetry.HasPreemptions, pushv1.SampleField_SAMPLE_FIELD_PREEMPTIONS, true, 0, maxCounter, func(s *telemetry.Sample) *float64 { return &s.Preemptions }},
	{telemetry.HasTTFT, pushv1.SampleField_SAMPLE_FIELD_TTFT, true, 0, maxCounter, func(s *telemetry.Sample) *float64 { return &s.TTFTSum }},
	{telemetry.HasTTFT, pushv1.SampleField_SAMPLE_FIELD_TTFT, true, 0, maxCounter, func(s *telemetry.Sample) *float64 { return &s.TTFTCount }},
	{telemetry.HasGPUUtil, pushv1.SampleField_SAMPLE_FIELD_GPU_UTIL, false, 0, 1, func(s *telemetry.Sample) *float64 { return &s.GPUUtil }},
	{telemetry.HasGRActive, pushv1.SampleField_SAMPLE_FIELD_GR_ACTIVE, false, 0, 1, func(s *telemetry.Sample) *float64 { return &s.GRActive }},
	{telemetry.HasDRAMActive, pushv1.SampleField_SAMPLE_FIELD_DRAM_ACTIVE, false, 0, 1, func(s *telemetry.Sample) *float64 { return &s.DRAMActive }},
	{telemetry.HasFBUsed, pushv1.SampleField_SAMPLE_FIELD_FB_USED, false, 0, maxMiB, func(s *telemetry.Sample) *float64 { return &s.FBUsedMiB }},
	{telemetry.HasFBTotal, pushv1.SampleField_SAMPLE_FIELD_FB_TOTAL, false, 0, maxMiB, func(s *telemetry.Sample) *float64 { return &s.FBTotalMiB }},
	{telemetry.HasPower, pushv1.SampleField_SAMPLE_FIELD_POWER, false, 0, maxWatts, func(s *telemetry.Sample) *float64 { return &s.PowerWatts }},
	{telemetry.HasPCIe, pushv1.SampleField_SAMPLE_FIELD_PCIE, false, 0, 1, func(s *telemetry.Sample) *float64 { return &s.PCIeShare }},
	{telemetry.HasXID, pushv1.SampleField_SAMPLE_FIELD_XID, true, 0, maxCounter, func(s *telemetry.Sample) *float64 { return &s.XIDEvents }},
}

// gpuFields is in ascending order of the wire's numbers.
var gpuFields = []gpuField{
	{telemetry.GPUHasUtil, pushv1.GPUField_GPU_FIELD_UTIL, 0, 1, func(g *telemetry.GPU) *float64 { return &g.Util }},
	{telemetry.GPUHasGRActive, pushv1.GPUField_GPU_FIELD_GR_ACTIVE, 0, 1, func(g *telemetry.GPU) *float64 { return &g.GRActive }},
	{telemetry.GPUHasSMActive, pushv1.GPUField_GPU_FIELD_SM_ACTIVE, 0, 1, func(g *telemetry.GPU) *float64 { return &g.SMActive }},
	{telemetry.GPUHasTensorActive, pushv1.GPUField_GPU_FIELD_TENSOR_ACTIVE, 0, 1, func(g *telemetry.GPU) *float64 { return &g.TensorActive }},
	{telemetry.GPUHasDRAMActive, pushv1.GPUField_GPU_FIELD_DRAM_ACTIVE, 0, 1, func(g *telemetry.GPU) *float64 { return &g.DRAMActive }},
	{telemetry.GPUHasFBUsed, pushv1.GPUField_GPU_FIELD_FB_USED, 0, maxMiB, func(g *telemetry.GPU) *float64 { return &g.FBUsedMiB }},
	{telemetry.GPUHasFBTotal, pushv1.GPUField_GPU_FIELD_FB_TOTAL, 0, maxMiB, func(g *telemetry.GPU) *float64 { return &g.FBTotalMiB }},
	{telemetry.GPUHasPower, pushv1.GPUField_GPU_FIELD_POWER, 0, maxWatts, func(g *telemetry.GPU) *float64 { return &g.PowerWatts }},
	{telemetry.GPUHasTemperatureMargin, pushv1.GPUField_GPU_FIELD_TEMPERATURE_MARGIN, -maxCelsius, maxCelsius, func(g *telemetry.GPU) *float64 { return &g.TemperatureMargin }},
	{telemetry.GPUHasPCIe, pushv1.GPUField_GPU_FIELD_PCIE, 0, maxRate, func(g *telemetry.GPU) *float64 { return &g.PCIeTX }},
	{telemetry.GPUHasPCIe, pushv1.GPUField_GPU_FIELD_PCIE, 0, maxRate, func(g *telemetry.GPU) *float64 { return &g.PCIeRX }},
	{telemetry.GPUHasPCIeLink, pushv1.GPUField_GPU_FIELD_PCIE_LINK, 0, maxRate, func(g *telemetry.GPU) *float64 { return &g.PCIeLink }},
}

// gpuScalars maps the fields with a place of their own in the row.
var gpuScalars = []struct {
	bit  telemetry.GPUMask
	wire pushv1.GPUField
}{
	{telemetry.GPUHasEnergy, pushv1.GPUField_GPU_FIELD_ENERGY},
	{telemetry.GPUHasThrottle, pushv1.GPUField_GPU_FIELD_THROTTLE},
	{telemetry.GPUHasXID, pushv1.GPUField_GPU_FIELD_XID},
	{telemetry.GPUHasRecovery, pushv1.GPUField_GPU_FIELD_RECOVERY},
	{telemetry.GPUHasDBE, pushv1.GPUField_GPU_FIELD_DBE},
	{telemetry.GPUHasRemap, pushv1.GPUField_GPU_FIELD_REMAP},
}

// inRange reports whether v lies in [low, high]; NaN does not.
func inRange(v, low, high float64) bool { return v >= low && v <= high }

// A mask of the wire has bit n set for field n.

const (
	conditionBit = uint64(1) << pushv1.SampleField_SAMPLE_FIELD_CONDITION
	knownSample  = conditionBit<<1 - 2 // bits 1 … CONDITION
	knownGPU     = uint64(1)<<(pushv1.GPUField_GPU_FIELD_REMAP+1) - 2
)

// count turns a counter of events into the wire's whole number.
func count(v float64) uint64 {
	if !inRange(v, 0, math.MaxInt64) {
		return math.MaxUint64 // refused by the reader
	}
	return uint64(v + 0.5)
}
