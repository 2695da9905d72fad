package scrape

import (
	"bytes"
	"math"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// quantity is a number that a page may hold, under one of several names.
type quantity uint8

const (
	qKVUsage quantity = iota
	qRunning
	qWaiting
	qMaxSeqs
	qKVTokens
	qKVBlocks      // KVTokens = blocks × block size, where those are series of their own
	qKVBlockTokens // tokens per block
	qPromptTokens
	qGenerationTokens
	qPreemptions
	qTTFTSum
	qTTFTCount
	qSteps // of the engine's loop; only a sign of life
	engineQuantities

	qGPUUtil quantity = iota - 1
	qGRActive
	qDRAMActive
	qFBUsed
	qFBFree
	qFBTotal
	qFBReserved
	qPower
	qEnergy
	qPCIeTX
	qPCIeRX
	qLinkGen
	qLinkWidth
	qXID
	qRecovery
	qRemapFailed
	qRemapPending
	quantities
)

// rule says how the series of one quantity become one number, and which values
// can be right. Blank values of DCGM (0x7ffffff0 and up for integers, 1.4e14
// for floats) and faults such as a utilisation of 4294967295 lie outside.
type rule struct {
	fold     fold
	min, max float64
}

// fold says how several series (one per data-parallel engine, or per GPU)
// become one.
type fold uint8

const (
	sum   fold = iota // engines share the work: add up
	worst             // the largest: what limits the next request
)

// maxCounter is above any token or request count of a process's life and far
// below the blank float.
const maxCounter = 1e14

var rules = [quantities]rule{
	qKVUsage:          {worst, 0, 1},
	qRunning:          {sum, 0, 1e6},
	qWaiting:          {sum, 0, 1e6},
	qMaxSeqs:          {sum, 1, 1e6},
	qKVTokens:         {sum, 1, 1e10},
	qKVBlocks:         {sum, 1, 1e10},
	qKVBlockTokens:    {worst, 1, 1e5},
	qPromptTokens:     {sum, 0, maxCounter},
	qGenerationTokens: {sum, 0, maxCounter},
	qPreemptions:      {sum, 0, maxCounter},
	qTTFTSum:          {sum, 0, maxCounter},
	qTTFTCount:        {sum, 0, maxCounter},
	qSteps:            {sum, 0, maxCounter},

	qGPUUtil:      {worst, 0, 1},
	qGRActive:     {worst, 0, 1},
	qDRAMActive:   {worst, 0, 1},
	qFBUsed:       {worst, 0, maxMiB},
	qFBFree:       {worst, 0, maxMiB},
	qFBTotal:      {worst, 1, maxMiB},
	qFBReserved:   {worst, 0, maxMiB},
	qPower:        {worst, 0, 1e4},
	qEnergy:       {worst, 0, maxCounter}, // mJ; 4.5 years at 700 W
	qPCIeTX:       {worst, 0, 1e12},
	qPCIeRX:       {worst, 0, 1e12},
	qLinkGen:      {worst, 1, telemetry.PCIeGenerations},
	qLinkWidth:    {worst, 1, 32},
	qXID:          {worst, 0, 1e4},
	qRecovery:     {worst, 0, float64(telemetry.RecoverSystemReboot)},
	qRemapFailed:  {worst, 0, 1},
	qRemapPending: {worst, 0, 1},
}

// maxMiB is a framebuffer of 4 TiB.
const maxMiB = 1 << 22

// ranks is how many sets of names one quantity may have on one page: a server
// that renames a metric shows both for a while, and only the better one counts.
const ranks = 2

// alias is one name of a quantity.
type alias struct {
	name  string
	q     quantity
	rank  uint8   // 0 preferred, 1 only if rank 0 is not on the page
	scale float64 // 0 means 1
	// label and value select series; only those with label == value count.
	label, value string
	// product, if set, are two labels whose numbers' product is the value (info
	// metrics, whose own value is always 1).
	product [2]string
}

// engineAliases are the names on model servers' pages.
//
// Sources: vllm/v1/metrics/loggers.py, sglang/srt/metrics/collector.py, the
// metric lists of trtllm-serve (also in the llm-d inference scheduler's metric
// protocol), of Triton's TensorRT-LLM backend and of TGI. TGI tells neither the
// use nor the size of its KV cache, nor a time to first token.
// What only the simulator publishes is not read, so that its fleet is judged by
// no more than a real one.
var engineAliases = []alias{
	{name: "vllm:kv_cache_usage_perc", q: qKVUsage},
	{name: "vllm:gpu_cache_usage_perc", q: qKVUsage, rank: 1}, // before v1
	{name: "vllm:num_requests_running", q: qRunning},
	{name: "vllm:num_requests_waiting", q: qWaiting},
	{name: "vllm:num_requests_waiting_by_reason", q: qWaiting, rank: 1},
	{name: "vllm:prompt_tokens_total", q: qPromptTokens},
	{name: "vllm:generation_tokens_total", q: qGenerationTokens},
	{name: "vllm:num_preemptions_total", q: qPreemptions},
	{name: "vllm:time_to_first_token_seconds_sum", q: qTTFTSum},
	{name: "vllm:time_to_first_token_seconds_count", q: qTTFTCount},
	{name: "vllm:cache_config_info", q: qKVTokens, product: [2]string{"num_gpu_blocks", "block_size"}},

	{name: "sglang:token_usage", q: qKVUsage},
	{name: "sglang:num_running_reqs", q: qRunning},
	{name: "sglang:num_queue_reqs", q: qWaiting},
	{name: "sglang:prompt_tokens_total", q: qPromptTokens},
	{name: "sglang:generation_tokens_total", q: qGenerationTokens},
	{name: "sglang:num_retracted_requests_total", q: qPreemptions},
	{name: "sglang:time_to_first_token_seconds_sum", q: qTTFTSum},
	{name: "sglang:time_to_first_token_seconds_count", q: qTTFTCount},
	{name: "sglang:cache_config_info", q: qKVTokens, product: [2]string{"num_pages", "page_size"}},

	{name: "trtllm_kv_cache_utilization", q: qKVUsage},
	{name: "trtllm_num_requests_running", q: qRunning},
	{name: "trtllm_num_requests_waiting", q: qWaiting},
	{name: "trtllm_kv_cache_max_blocks", q: qKVBlocks},
	{name: "trtllm_kv_cache_tokens_per_block", q: qKVBlockTokens},
	{name: "trtllm_time_to_first_token_seconds_sum", q: qTTFTSum},
	{name: "trtllm_time_to_first_token_seconds_count", q: qTTFTCount},

	{name: "nv_trt_llm_request_metrics", q: qRunning, label: "request_type", value: "scheduled"},
	{name: "nv_trt_llm_request_metrics", q: qWaiting, label: "request_type", value: "waiting"},
	{name: "nv_trt_llm_request_metrics", q: qMaxSeqs, label: "request_type", value: "max"},
	{name: "nv_trt_llm_kv_cache_block_metrics", q: qKVUsage, label: "kv_cache_block_type", value: "fraction"},
	{name: "nv_trt_llm_kv_cache_block_metrics", q: qKVBlocks, label: "kv_cache_block_type", value: "max"},
	{name: "nv_trt_llm_kv_cache_block_metrics", q: qKVBlockTokens, label: "kv_cache_block_type", value: "tokens_per"},
	{name: "nv_trt_llm_general_metrics", q: qSteps, label: "general_type", value: "iteration_counter"},

	{name: "tgi_batch_current_size", q: qRunning},
	{name: "tgi_queue_size", q: qWaiting},
	{name: "tgi_batch_inference_count", q: qSteps},
}

const (
	percent = 0.01
	mebi    = 1.0 / (1 << 20)
)

// gpuAliases are the names on GPU exporters' pages: dcgm-exporter with the
// field names before and since DCGM 4.6 (GPU utilisation is an integer percent
// under either), its 2018 ancestor, and nvidia_gpu_exporter.
//
// DCGM_FI_PROF_PCIE_TX_BYTES and RX_BYTES are rates in bytes per second, though
// some lists call them counters (dcgm-exporter #87). The older
// DCGM_FI_DEV_PCIE_TX_THROUGHPUT is answered no more and not read.
var gpuAliases = []alias{
	{name: "DCGM_FI_DEV_GPU_UTIL", q: qGPUUtil, scale: percent},
	{name: "DCGM_FI_DEV_GPU_UTIL_RATIO", q: qGPUUtil, scale: percent},
	{name: "dcgm_gpu_utilization", q: qGPUUtil, scale: percent},
	{name: "nvidia_smi_utilization_gpu_ratio", q: qGPUUtil, rank: 1},
	{name: "DCGM_FI_PROF_GR_ENGINE_ACTIVE", q: qGRActive},
	{name: "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", q: qGRActive},
	{name: "DCGM_FI_PROF_DRAM_ACTIVE", q: qDRAMActive},
	{name: "DCGM_FI_PROF_DRAM_UTIL_RATIO", q: qDRAMActive},
	{name: "DCGM_FI_DEV_FB_USED", q: qFBUsed},
	{name: "dcgm_fb_used", q: qFBUsed},
	{name: "nvidia_smi_memory_used_bytes", q: qFBUsed, rank: 1, scale: mebi},
	{name: "dcgm_gpu_memory_used_bytes", q: qFBUsed, rank: 1, scale: mebi},
	{name: "DCGM_FI_DEV_FB_FREE", q: qFBFree},
	{name: "dcgm_fb_free", q: qFBFree},
	{name: "nvidia_smi_memory_free_bytes", q: qFBFree, rank: 1, scale: mebi},
	{name: "DCGM_FI_DEV_FB_TOTAL", q: qFBTotal},
	{name: "nvidia_smi_memory_total_bytes", q: qFBTotal, rank: 1, scale: mebi},
	{name: "DCGM_FI_DEV_FB_RESERVED", q: qFBReserved},
	{name: "nvidia_smi_memory_reserved_bytes", q: qFBReserved, rank: 1, scale: mebi},
	{name: "DCGM_FI_DEV_POWER_USAGE", q: qPower},
	{name: "DCGM_FI_DEV_BOARD_POWER_WATTS", q: qPower},
	{name: "dcgm_power_usage", q: qPower},
	{name: "nvidia_smi_power_draw_watts", q: qPower, rank: 1},
	{name: "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", q: qEnergy},
	{name: "dcgm_total_energy_consumption", q: qEnergy},
	{name: "DCGM_FI_PROF_PCIE_TX_BYTES", q: qPCIeTX},
	{name: "DCGM_FI_PROF_PCIE_RX_BYTES", q: qPCIeRX},
	// A link that idles falls back to a lower generation, so the largest counts.
	{name: "DCGM_FI_DEV_PCIE_MAX_LINK_GEN", q: qLinkGen},
	{name: "DCGM_FI_DEV_PCIE_LINK_GEN", q: qLinkGen, rank: 1},
	{name: "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", q: qLinkWidth},
	{name: "DCGM_FI_DEV_PCIE_LINK_WIDTH", q: qLinkWidth, rank: 1},
	{name: "DCGM_FI_DEV_XID_ERRORS", q: qXID},
	{name: "DCGM_FI_DEV_XID_ERROR", q: qXID},
	{name: "dcgm_xid_errors", q: qXID},
	{name: "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", q: qRecovery},
	{name: "DCGM_FI_DEV_GPU_RECOVERY_ACTION", q: qRecovery},
	{name: "DCGM_FI_DEV_ROW_REMAP_FAILURE", q: qRemapFailed},
	{name: "DCGM_FI_DEV_ROW_REMAP_FAILED", q: qRemapFailed},
	{name: "DCGM_FI_DEV_ROW_REMAP_PENDING", q: qRemapPending},
}

// dictionary is an alias list ready for scanning: aliases[id] are those that
// share one name.
type dictionary struct {
	names   *NameTable
	aliases [][]alias
}

func newDictionary(list []alias) *dictionary {
	var names []string
	ids := map[string]int{}
	d := &dictionary{}
	for _, a := range list {
		if a.scale == 0 {
			a.scale = 1
		}
		id, ok := ids[a.name]
		if !ok {
			id = len(names)
			ids[a.name] = id
			names = append(names, a.name)
			d.aliases = append(d.aliases, nil)
		}
		d.aliases[id] = append(d.aliases[id], a)
	}
	d.names = NewNameTable(names...)
	return d
}

var (
	engineNames = newDictionary(engineAliases)
	gpuNames    = newDictionary(gpuAliases)
)

// cell gathers the series of one quantity and rank.
type cell struct {
	value float64
	seen  bool
	// spoilt marks a sum of which one part was refused: the rest would be too
	// low.
	spoilt bool
}

// add takes in one series' value; false says that it cannot be right.
func (c *cell) add(q quantity, value float64) bool {
	rule := &rules[q]
	if !(value >= rule.min && value <= rule.max) || math.IsNaN(value) {
		c.spoilt = c.spoilt || rule.fold == sum
		return false
	}
	switch {
	case !c.seen:
		c.value, c.seen = value, true
	case rule.fold == sum:
		c.value += value
	case q == qXID:
		c.value = graver(c.value, value)
	default:
		c.value = max(c.value, value)
	}
	return true
}

// best is the value of the best rank that is there.
func best(cells *[ranks]cell) (float64, bool) {
	for i := range cells {
		if c := &cells[i]; c.seen && !c.spoilt {
			return c.value, true
		}
	}
	return 0, false
}

// reading gathers the numbers of one engine page.
type reading struct {
	cells    [engineQuantities][ranks]cell
	stats    Stats
	rejected int // values outside their range, NaN and infinite ones included
}

// readEngine scans an engine's page.
func readEngine(page []byte) (r reading) {
	r.stats = Scan(page, engineNames.names, func(id int, labels []byte, value float64) {
		for i := range engineNames.aliases[id] {
			a := &engineNames.aliases[id][i]
			if a.label != "" && string(Label(labels, a.label)) != a.value {
				continue
			}
			v := value
			if a.product[0] != "" {
				v = product(labels, a.product)
			}
			if !r.cells[a.q][a.rank].add(a.q, v*a.scale) {
				r.rejected++
			}
		}
	})
	return r
}

// graver returns the XID code of the graver class, the larger code among
// equals.
func graver(a, b float64) float64 {
	ca, cb := telemetry.ClassifyXID(int(a)), telemetry.ClassifyXID(int(b))
	if ca > cb || ca == cb && a > b {
		return a
	}
	return b
}

// product multiplies the numbers in two labels; NaN if either is none.
func product(labels []byte, names [2]string) float64 {
	a, okA := parseNumber(bytes.TrimSpace(Label(labels, names[0])))
	b, okB := parseNumber(bytes.TrimSpace(Label(labels, names[1])))
	if !okA || !okB {
		return math.NaN()
	}
	return a * b
}

// get returns a quantity from the best rank that is on the page.
func (r *reading) get(q quantity) (float64, bool) { return best(&r.cells[q]) }

// steps is the engine's step counter, 0 if it has none.
func (r *reading) steps() float64 {
	v, _ := r.get(qSteps)
	return v
}

// fill writes what the page said into the sample.
func (r *reading) fill(s *telemetry.Sample) {
	set := func(q quantity, to *float64, has telemetry.Mask) {
		if v, ok := r.get(q); ok {
			*to = v
			s.Known |= has
		}
	}
	set(qKVUsage, &s.KVUsage, telemetry.HasKVUsage)
	set(qRunning, &s.Running, telemetry.HasRunning)
	set(qWaiting, &s.Waiting, telemetry.HasWaiting)
	set(qMaxSeqs, &s.MaxSeqs, telemetry.HasMaxSeqs)
	set(qKVTokens, &s.KVTokens, telemetry.HasKVTokens)
	set(qPromptTokens, &s.PromptTokens, telemetry.HasPromptTokens)
	set(qGenerationTokens, &s.GenerationTokens, telemetry.HasGenerationTokens)
	set(qPreemptions, &s.Preemptions, telemetry.HasPreemptions)
	blocks, okBlocks := r.get(qKVBlocks)
	size, okSize := r.get(qKVBlockTokens)
	if okBlocks && okSize && !s.Known.Has(telemetry.HasKVTokens) {
		s.KVTokens = blocks * size
		s.Known |= telemetry.HasKVTokens
	}
	sum, okSum := r.get(qTTFTSum)
	count, okCount := r.get(qTTFTCount)
	if okSum && okCount {
		s.TTFTSum, s.TTFTCount = sum, count
		s.Known |= telemetry.HasTTFT
	}
}
