package scrape

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

const dcgmPage = `# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100",Hostname="a"} 50
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-2",device="nvidia1",modelName="NVIDIA H100",Hostname="a"} 90
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1"} 74000
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-2"} 75000
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-1"} 0.25
DCGM_FI_PROF_DRAM_ACTIVE{gpu="1",UUID="GPU-2"} 0.75
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1"} 400.5
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-2"} 690
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1"} 79
DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-2"} 94
`

func engine(page string) (telemetry.Sample, reading) {
	var s telemetry.Sample
	r := readEngine([]byte(page))
	r.fill(&s)
	return s, r
}

func gpu(page string, gpus ...string) (telemetry.Sample, *gpuPage) {
	var s telemetry.Sample
	p := newGPUPage(gpus)
	s.SetGPUs(p.read([]byte(page), time.Now()))
	return s, p
}

func TestEveryServersNamesAreUnderstood(t *testing.T) {
	const load = telemetry.HasRunning | telemetry.HasWaiting
	for name, tc := range map[string]struct {
		page string
		want telemetry.Sample
	}{
		"vLLM": {`vllm:num_requests_running{engine="0"} 3
vllm:num_requests_waiting{engine="0"} 2
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="2588"} 1.0
vllm:prompt_tokens_total 10
vllm:generation_tokens_total 20
vllm:num_preemptions_total 1
vllm:time_to_first_token_seconds_sum 4
vllm:time_to_first_token_seconds_count 8
`, telemetry.Sample{Running: 3, Waiting: 2, KVUsage: 0.5, KVTokens: 41408, PromptTokens: 10, GenerationTokens: 20,
			Preemptions: 1, TTFTSum: 4, TTFTCount: 8,
			Known: load | telemetry.HasKVUsage | telemetry.HasKVTokens | telemetry.HasPromptTokens |
				telemetry.HasGenerationTokens | telemetry.HasPreemptions | telemetry.HasTTFT}},
		"vLLM before v1": {"vllm:gpu_cache_usage_perc 0.25\n",
			telemetry.Sample{KVUsage: 0.25, Known: telemetry.HasKVUsage}},
		"vLLM with both names": {"vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.25\n",
			telemetry.Sample{KVUsage: 0.25, Known: telemetry.HasKVUsage}},
		"vLLM before its cache is sized": {"vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\n",
			telemetry.Sample{}},
		"vLLM with two engines": {`vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
vllm:num_requests_waiting{engine="0"} 0
vllm:num_requests_waiting{engine="1"} 5
vllm:kv_cache_usage_perc{engine="0"} 0.9
vllm:kv_cache_usage_perc{engine="1"} 0.1
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1
`, telemetry.Sample{Running: 7, Waiting: 5, KVUsage: 0.9, KVTokens: 3200,
			Known: load | telemetry.HasKVUsage | telemetry.HasKVTokens}},
		// Its own series are for people: scoring must not know more than with vLLM.
		"the simulator": {"vllm:num_requests_waiting 2\nfairlead_sim_queued_prompt_tokens 4096\nfairlead_sim_max_num_seqs 32\n",
			telemetry.Sample{Waiting: 2, Known: telemetry.HasWaiting}},
		"SGLang": {`sglang:num_running_reqs{model_name="x"} 3
sglang:num_queue_reqs{model_name="x"} 2
sglang:token_usage{model_name="x"} 0.5
sglang:cache_config_info{page_size="1",num_pages="5000"} 1
`, telemetry.Sample{Running: 3, Waiting: 2, KVUsage: 0.5, KVTokens: 5000,
			Known: load | telemetry.HasKVUsage | telemetry.HasKVTokens}},
		"trtllm-serve": {`trtllm_num_requests_running 3
trtllm_num_requests_waiting 2
trtllm_kv_cache_utilization 0.5
trtllm_kv_cache_max_blocks 100
trtllm_kv_cache_tokens_per_block 32
`, telemetry.Sample{Running: 3, Waiting: 2, KVUsage: 0.5, KVTokens: 3200,
			Known: load | telemetry.HasKVUsage | telemetry.HasKVTokens}},
		"Triton": {`nv_trt_llm_request_metrics{model="x",request_type="scheduled"} 3
nv_trt_llm_request_metrics{model="x",request_type="waiting"} 2
nv_trt_llm_request_metrics{model="x",request_type="max"} 512
nv_trt_llm_request_metrics{model="x",request_type="active"} 5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64
`, telemetry.Sample{Running: 3, Waiting: 2, MaxSeqs: 512, KVUsage: 0.5, KVTokens: 6400,
			Known: load | telemetry.HasMaxSeqs | telemetry.HasKVUsage | telemetry.HasKVTokens}},
		"TGI": {"tgi_batch_current_size 3\ntgi_queue_size 2\n", telemetry.Sample{Running: 3, Waiting: 2, Known: load}},
	} {
		t.Run(name, func(t *testing.T) {
			if got, _ := engine(tc.page); got != tc.want {
				t.Errorf("got  %+v\nwant %+v", got, tc.want)
			}
		})
	}
}

func TestValuesThatCannotBeRightAreUnknown(t *testing.T) {
	for _, v := range []string{"NaN", "+Inf", "-Inf", "-1", "1.5", "140737488355328"} {
		if s, r := engine("vllm:kv_cache_usage_perc " + v + "\n"); s.Known != 0 || r.rejected != 1 {
			t.Errorf("KV usage %s: known %b, rejected %d", v, s.Known, r.rejected)
		}
	}
	// DCGM #199 (utilisation of 4294967295 and 334905), the integer blanks, the
	// float blank of power.
	for _, line := range []string{
		"DCGM_FI_DEV_GPU_UTIL 4294967295", "DCGM_FI_DEV_GPU_UTIL 334905", "DCGM_FI_DEV_GPU_UTIL 101",
		"DCGM_FI_DEV_GPU_UTIL 9223372036854775794", "DCGM_FI_DEV_FB_USED 2147483632",
		"DCGM_FI_DEV_POWER_USAGE 140737488355330", "DCGM_FI_DEV_XID_ERRORS 9223372036854775792",
	} {
		if s, r := gpu(line + "\n"); s.Known != 0 || r.rejected != 1 {
			t.Errorf("%s: known %b, rejected %d", line, s.Known, r.rejected)
		}
	}
}

func TestASumWithARefusedPartIsUnknown(t *testing.T) {
	s, _ := engine("vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_running{engine=\"1\"} NaN\n")
	if s.Known != 0 {
		t.Fatalf("running %v from one engine of two", s.Running)
	}
	s, _ = engine("vllm:kv_cache_usage_perc{engine=\"0\"} 0.3\nvllm:kv_cache_usage_perc{engine=\"1\"} NaN\n")
	if s.KVUsage != 0.3 {
		t.Fatalf("KV usage %v, want the engine's that is known", s.KVUsage)
	}
}
