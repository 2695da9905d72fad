package scrape

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

func TestGPUPageGivesTheWorst(t *testing.T) {
	s, _ := gpu(dcgmPage)
	if s.GPUUtil != 0.9 || s.DRAMActive != 0.75 || s.FBUsedMiB != 75000 || s.PowerWatts != 690 {
		t.Errorf("%+v", s)
	}
	if s.XID != 79 {
		t.Errorf("XID %d, want 79: graver than the larger 94", s.XID)
	}
}

func TestGPUPageGivesTheEndpointsGPUs(t *testing.T) {
	s, _ := gpu(dcgmPage, "GPU-2")
	if s.GPUUtil != 0.9 || s.FBUsedMiB != 75000 || s.XID != 94 {
		t.Errorf("%+v", s)
	}
	for _, spelling := range []string{"uuid", "UUID"} {
		page := strings.NewReplacer("UUID", spelling, "Hostname", "hostname").Replace(dcgmPage)
		if s, _ := gpu(page, "GPU-1"); math.Abs(s.GPUUtil-0.5) > 1e-12 || s.XID != 79 {
			t.Errorf("label %s: %+v", spelling, s)
		}
	}
	if s, _ := gpu(dcgmPage, "GPU-9"); s.Known != 0 {
		t.Errorf("numbers of a GPU that is not on the page: %+v", s)
	}
	// nvidia_gpu_exporter leaves the prefix out.
	if s, _ := gpu("nvidia_smi_utilization_gpu_ratio{uuid=\"8a3b-1\"} 0.5\nnvidia_smi_utilization_gpu_ratio{uuid=\"9-1\"} 0.9\n", "GPU-8a3b"); s.GPUUtil != 0.5 {
		t.Errorf("a UUID without its prefix: %+v", s)
	}
}

func TestGPUNamesOfAllExporters(t *testing.T) {
	const link = telemetry.HasPCIe
	for page, want := range map[string]telemetry.Sample{
		"DCGM_FI_DEV_GPU_UTIL_RATIO 50\n":                          {GPUUtil: 0.5, Known: telemetry.HasGPUUtil},
		"dcgm_gpu_utilization 50\n":                                {GPUUtil: 0.5, Known: telemetry.HasGPUUtil},
		"nvidia_smi_utilization_gpu_ratio 0.5\n":                   {GPUUtil: 0.5, Known: telemetry.HasGPUUtil},
		"DCGM_FI_PROF_GR_ENGINE_ACTIVE 0.25\n":                     {GRActive: 0.25, Known: telemetry.HasGRActive},
		"DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO 0.25\n":                 {GRActive: 0.25, Known: telemetry.HasGRActive},
		"DCGM_FI_PROF_DRAM_UTIL_RATIO 0.5\n":                       {DRAMActive: 0.5, Known: telemetry.HasDRAMActive},
		"dcgm_fb_used 1000\n":                                      {FBUsedMiB: 1000, Known: telemetry.HasFBUsed},
		"nvidia_smi_memory_used_bytes 1.048576e+09\n":              {FBUsedMiB: 1000, Known: telemetry.HasFBUsed},
		"dcgm_gpu_memory_used_bytes 1048576\n":                     {FBUsedMiB: 1, Known: telemetry.HasFBUsed},
		"DCGM_FI_DEV_BOARD_POWER_WATTS 300\n":                      {PowerWatts: 300, Known: telemetry.HasPower},
		"DCGM_FI_DEV_XID_ERROR{err_code=\"31\",err_msg=\"\"} 31\n": {XID: 31, Known: telemetry.HasXID},
		"DCGM_FI_DEV_FB_USED 7\nDCGM_FI_DEV_FB_FREE 2\nDCGM_FI_DEV_FB_RESERVED 1\n": {FBUsedMiB: 7, FBTotalMiB: 9,
			Known: telemetry.HasFBUsed | telemetry.HasFBTotal},
		"DCGM_FI_DEV_FB_USED 7\nDCGM_FI_DEV_FB_TOTAL 10\n": {FBUsedMiB: 7, FBTotalMiB: 10,
			Known: telemetry.HasFBUsed | telemetry.HasFBTotal},
		"DCGM_FI_DEV_FB_USED 7\nDCGM_FI_DEV_FB_TOTAL 10\nDCGM_FI_DEV_FB_RESERVED 1\n": {FBUsedMiB: 7, FBTotalMiB: 9,
			Known: telemetry.HasFBUsed | telemetry.HasFBTotal},
		"dcgm_fb_used 7\ndcgm_fb_free 3\n": {FBUsedMiB: 7, FBTotalMiB: 10, Known: telemetry.HasFBUsed | telemetry.HasFBTotal},
		"nvidia_smi_memory_used_bytes 1048576\nnvidia_smi_memory_total_bytes 4194304\nnvidia_smi_memory_reserved_bytes 1048576\n": {FBUsedMiB: 1,
			FBTotalMiB: 3, Known: telemetry.HasFBUsed | telemetry.HasFBTotal},
		// Gen 5 ×16: 63.0 GB/s each way.
		"DCGM_FI_PROF_PCIE_TX_BYTES 6.3015384e9\nDCGM_FI_PROF_PCIE_RX_BYTES 1\nDCGM_FI_DEV_PCIE_LINK_GEN 5\nDCGM_FI_DEV_PCIE_LINK_WIDTH 16\n": {PCIeShare: 0.1, Known: link},
		// Gen 6 ×16: 118 GB/s each way.
		"DCGM_FI_PROF_PCIE_RX_BYTES 11.8e9\nDCGM_FI_DEV_PCIE_LINK_GEN 6\nDCGM_FI_DEV_PCIE_LINK_WIDTH 16\n": {PCIeShare: 0.1, Known: link},
		// The link sleeps at Gen 1 and could do Gen 4.
		"DCGM_FI_PROF_PCIE_RX_BYTES 3.15076923e9\nDCGM_FI_DEV_PCIE_LINK_GEN 1\nDCGM_FI_DEV_PCIE_MAX_LINK_GEN 4\nDCGM_FI_DEV_PCIE_MAX_LINK_WIDTH 16\n": {PCIeShare: 0.1, Known: link},
		"DCGM_FI_PROF_PCIE_RX_BYTES 3e9\n":        {},
		"DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION 0\n": {Condition: telemetry.ConditionOK, Known: telemetry.HasCondition},
		"DCGM_FI_DEV_GPU_RECOVERY_ACTION 2\n":     {Condition: telemetry.ConditionEject, Known: telemetry.HasCondition},
		"DCGM_FI_DEV_GPU_RECOVERY_ACTION 5\n":     {Condition: telemetry.ConditionDrain, Known: telemetry.HasCondition},
		"DCGM_FI_DEV_GPU_RECOVERY_ACTION 99\n":    {},
		"DCGM_FI_DEV_ROW_REMAP_FAILURE 1\n":       {Condition: telemetry.ConditionEject, Known: telemetry.HasCondition},
		"DCGM_FI_DEV_ROW_REMAP_FAILED 0\n":        {Condition: telemetry.ConditionOK, Known: telemetry.HasCondition},
		"DCGM_FI_DEV_ROW_REMAP_PENDING 1\n":       {Condition: telemetry.ConditionDrain, Known: telemetry.HasCondition},
		"DCGM_FI_DEV_PCIE_LINK_GEN 0\nDCGM_FI_DEV_PCIE_LINK_WIDTH 16\nDCGM_FI_PROF_PCIE_RX_BYTES 1\n": {},
	} {
		got, _ := gpu(page)
		if math.Abs(got.PCIeShare-want.PCIeShare) < 1e-6 {
			got.PCIeShare = want.PCIeShare
		}
		if got != want {
			t.Errorf("%s: got  %+v\nwant %+v", page, got, want)
		}
	}
}

// migPage is a GPU cut into two instances beside a whole one: what concerns the
// device stands in its own row.
const migPage = `DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1"} 31
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1"} 350
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1"} 70000
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-1"} 10000
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1",Hostname="a"} 30000
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-1",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1",Hostname="a"} 10000
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1",GPU_I_PROFILE="1g.10gb",GPU_I_ID="13",Hostname="a"} 9000
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-1",GPU_I_PROFILE="1g.10gb",GPU_I_ID="13",Hostname="a"} 500
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0",UUID="GPU-1",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1",Hostname="a"} 0.3
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0",UUID="GPU-1",GPU_I_PROFILE="1g.10gb",GPU_I_ID="13",Hostname="a"} 0.9
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="1",UUID="GPU-2",GPU_I_PROFILE="",GPU_I_ID="",Hostname="a"} 0.6
`

func TestMIGInstancesAreToldApart(t *testing.T) {
	for selection, want := range map[string]telemetry.Sample{
		"GPU-1/1": {FBUsedMiB: 30000, FBTotalMiB: 40000, GRActive: 0.3, PowerWatts: 350, XID: 31,
			Known: telemetry.HasFBUsed | telemetry.HasFBTotal | telemetry.HasGRActive | telemetry.HasPower | telemetry.HasXID},
		"GPU-1/13": {FBUsedMiB: 9000, FBTotalMiB: 9500, GRActive: 0.9, PowerWatts: 350, XID: 31,
			Known: telemetry.HasFBUsed | telemetry.HasFBTotal | telemetry.HasGRActive | telemetry.HasPower | telemetry.HasXID},
		"GPU-1/3": {PowerWatts: 350, XID: 31, Known: telemetry.HasPower | telemetry.HasXID}, // no such instance
		"GPU-1": {FBUsedMiB: 9000, FBTotalMiB: 9500, GRActive: 0.9, PowerWatts: 350, XID: 31,
			Known: telemetry.HasFBUsed | telemetry.HasFBTotal | telemetry.HasGRActive | telemetry.HasPower | telemetry.HasXID},
		"GPU-2":   {GRActive: 0.6, Known: telemetry.HasGRActive},
		"GPU-2/1": {},
	} {
		if got, _ := gpu(migPage, selection); got != want {
			t.Errorf("%s: got  %+v\nwant %+v", selection, got, want)
		}
	}
	_, p := gpu(migPage)
	var ids []string
	for _, g := range p.gpus {
		ids = append(ids, g.ID+" "+g.Profile)
	}
	if want := []string{"GPU-1 ", "GPU-1/1 3g.40gb", "GPU-1/13 1g.10gb", "GPU-2 "}; !slices.Equal(ids, want) {
		t.Errorf("GPUs %q, want %q", ids, want)
	}
}

func TestSeriesWithoutAUUIDSpeakForTheNode(t *testing.T) {
	page := "DCGM_FI_DEV_GPU_UTIL 40\nDCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-1\"} 20\nDCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-2\"} 90\n"
	if s, _ := gpu(page, "GPU-1"); s.GPUUtil != 0.4 {
		t.Errorf("utilisation %v, want the node's", s.GPUUtil)
	}
	// Two GPUs told apart by their number alone.
	s, p := gpu("DCGM_FI_DEV_FB_USED{gpu=\"0\"} 30\nDCGM_FI_DEV_FB_FREE{gpu=\"0\"} 10\nDCGM_FI_DEV_FB_USED{gpu=\"1\"} 20\nDCGM_FI_DEV_FB_FREE{gpu=\"1\"} 0\n", "GPU-1")
	if s.FBUsedMiB != 20 || s.FBTotalMiB != 20 || len(p.gpus) != 2 {
		t.Errorf("%d GPUs, %+v", len(p.gpus), s)
	}
}

// gpuPages reads pages one after the other, as one exporter's.
type gpuPages struct {
	page *gpuPage
	now  time.Time
}

func (g *gpuPages) read(after time.Duration, lines ...string) telemetry.Sample {
	g.now = g.now.Add(after)
	var s telemetry.Sample
	s.SetGPUs(g.page.read([]byte(strings.Join(lines, "\n")), g.now))
	return s
}

func TestGPUsWhoseEnergyStandsStillAreStale(t *testing.T) {
	energy := func(gpu string, mj, watts int) string {
		return fmt.Sprintf("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{UUID=%q} %d\nDCGM_FI_DEV_POWER_USAGE{UUID=%q} %d\nDCGM_FI_DEV_GPU_UTIL{UUID=%q} 50", gpu, mj, gpu, watts, gpu)
	}
	g := gpuPages{newGPUPage(nil), time.Now()}
	alive := func(what string, s telemetry.Sample, want bool) {
		t.Helper()
		if got := s.Known.Has(telemetry.HasGPUUtil); got != want {
			t.Errorf("%s: known %v, want %v", what, got, want)
		}
	}
	alive("first page", g.read(0, energy("GPU-1", 1000, 300)), true)
	alive("2 s without a change", g.read(frozenAfter, energy("GPU-1", 1000, 300)), true)
	alive("more", g.read(time.Millisecond, energy("GPU-1", 1000, 300)), false)
	if g.page.frozen != 1 {
		t.Errorf("%d counted as frozen", g.page.frozen)
	}
	alive("it moves again", g.read(time.Second, energy("GPU-1", 1001, 300)), true)
	alive("a reset of the counter is a move", g.read(3*time.Second, energy("GPU-1", 5, 300)), true)
	alive("frozen again", g.read(3*time.Second, energy("GPU-1", 5, 300)), false)
	alive("a GPU that draws nothing", g.read(time.Second, energy("GPU-1", 5, 0)), true)

	// One of two freezes: the other's numbers stand.
	g = gpuPages{newGPUPage(nil), time.Now()}
	g.read(0, energy("GPU-1", 1, 700), energy("GPU-2", 1, 300))
	if s := g.read(3*time.Second, energy("GPU-1", 1, 700), energy("GPU-2", 2, 300)); s.PowerWatts != 300 || g.page.frozen != 1 {
		t.Errorf("%+v, %d frozen", s, g.page.frozen)
	}
	// A frozen GPU's instances are frozen with it.
	instance := "\nDCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID=\"GPU-1\",GPU_I_ID=\"1\"} 0.5"
	g = gpuPages{newGPUPage([]string{"GPU-1/1"}), time.Now()}
	g.read(0, energy("GPU-1", 1, 700)+instance)
	if s := g.read(3*time.Second, energy("GPU-1", 1, 700)+instance); s.Known != 0 {
		t.Errorf("an instance of a frozen GPU: %+v", s)
	}
	// Without the counter there is nothing to go by.
	g = gpuPages{newGPUPage(nil), time.Now()}
	g.read(0, "DCGM_FI_DEV_GPU_UTIL 50")
	alive("no energy on the page", g.read(time.Hour, "DCGM_FI_DEV_GPU_UTIL 50"), true)
}

func TestGPUsThatVanishAreForgotten(t *testing.T) {
	g := gpuPages{newGPUPage(nil), time.Now()}
	one := "DCGM_FI_DEV_XID_ERRORS{UUID=\"GPU-1\",GPU_I_ID=\"1\",GPU_I_PROFILE=\"3g.40gb\"} 79"
	g.read(0, one, "DCGM_FI_DEV_XID_ERRORS{UUID=\"GPU-2\"} 0")
	if s := g.read(time.Second, "DCGM_FI_DEV_XID_ERRORS{UUID=\"GPU-2\"} 0"); s.XID != 0 || len(g.page.rows) != 1 {
		t.Errorf("%d rows, %+v", len(g.page.rows), s)
	}
	// An instance id dealt anew to another size is another instance.
	g.read(time.Second, one)
	g.read(time.Second, strings.ReplaceAll(one, "3g.40gb", "1g.10gb"))
	if len(g.page.rows) != 1 || g.page.rows[0].gpu.Profile != "1g.10gb" {
		t.Errorf("rows %+v", g.page.rows)
	}
	if s := g.read(time.Second, ""); s.Known != 0 || len(g.page.rows) != 0 {
		t.Errorf("after an empty page: %d rows, %+v", len(g.page.rows), s)
	}
}

func TestRowsAreBounded(t *testing.T) {
	var lines []string
	for i := range maxRows + 10 {
		lines = append(lines, fmt.Sprintf("DCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-%d\"} 50", i))
	}
	g := gpuPages{newGPUPage(nil), time.Now()}
	g.read(0, lines...)
	if len(g.page.rows) != maxRows || g.page.dropped != 10 {
		t.Errorf("%d rows, %d dropped", len(g.page.rows), g.page.dropped)
	}
	g = gpuPages{newGPUPage(nil), time.Now()}
	long := strings.Repeat("x", maxLabels)
	s := g.read(0, "DCGM_FI_DEV_GPU_UTIL{UUID=\""+long+"\"} 99", "DCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-1\",pod=\""+long+"\"} 50")
	if len(g.page.rows) != 1 || g.page.dropped != 1 || s.GPUUtil != 0.5 || len(g.page.rows[0].raw) != 0 {
		t.Errorf("%d rows, %d dropped, %+v", len(g.page.rows), g.page.dropped, s)
	}
}

// TestPageAndSetGPUsAgree writes random GPUs out as a page and reads them back:
// the endpoint's sample is what SetGPUs makes of the GPUs themselves.
func TestPageAndSetGPUsAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := func(name string, most int) float64 { return float64(rapid.IntRange(0, most).Draw(t, name)) }
		var page strings.Builder
		var chosen []telemetry.GPU
		var selection []string
		for i := range rapid.IntRange(1, 6).Draw(t, "gpus") {
			g := telemetry.GPU{ID: fmt.Sprintf("GPU-%c", 'a'+i)}
			labels := fmt.Sprintf("UUID=%q", g.ID)
			if rapid.Bool().Draw(t, "instance") {
				g.Profile = "1g.10gb"
				labels += fmt.Sprintf(",GPU_I_ID=%q,GPU_I_PROFILE=%q", fmt.Sprint(i), g.Profile)
				g.ID += fmt.Sprint("/", i)
			}
			say := func(name string, v float64, to *float64, scale float64, has telemetry.GPUMask) {
				if rapid.IntRange(0, 3).Draw(t, name+" is there") > 0 {
					fmt.Fprintf(&page, "%s{%s} %v\n", name, labels, v)
					*to = v * scale
					g.Known |= has
				}
			}
			var xid, recovery, free, gen, width float64
			say("DCGM_FI_DEV_GPU_UTIL", number("util", 100), &g.Util, percent, telemetry.GPUHasUtil)
			say("DCGM_FI_PROF_GR_ENGINE_ACTIVE", number("gr", 100)/128, &g.GRActive, 1, telemetry.GPUHasGRActive)
			say("DCGM_FI_PROF_DRAM_ACTIVE", number("dram", 100)/128, &g.DRAMActive, 1, telemetry.GPUHasDRAMActive)
			say("DCGM_FI_DEV_FB_USED", 1+number("used", 80_000), &g.FBUsedMiB, 1, telemetry.GPUHasFBUsed)
			say("DCGM_FI_DEV_FB_FREE", number("free", 80_000), &free, 1, 0)
			if g.Known.Has(telemetry.GPUHasFBUsed) && strings.Contains(page.String(), "FB_FREE{"+labels) {
				g.FBTotalMiB = g.FBUsedMiB + free
				g.Known |= telemetry.GPUHasFBTotal
			}
			say("DCGM_FI_DEV_POWER_USAGE", number("power", 700), &g.PowerWatts, 1, telemetry.GPUHasPower)
			say("DCGM_FI_PROF_PCIE_TX_BYTES", number("tx", 1<<30), &g.PCIeTX, 1, telemetry.GPUHasPCIe)
			say("DCGM_FI_PROF_PCIE_RX_BYTES", number("rx", 1<<30), &g.PCIeRX, 1, telemetry.GPUHasPCIe)
			say("DCGM_FI_DEV_PCIE_MAX_LINK_GEN", 1+number("gen", 5), &gen, 1, 0)
			say("DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", 1+number("width", 15), &width, 1, 0)
			if gen > 0 && width > 0 {
				g.PCIeLink = telemetry.PCIeBandwidth(int(gen), int(width))
				g.Known |= telemetry.GPUHasPCIeLink
			}
			say("DCGM_FI_DEV_XID_ERRORS", float64(rapid.SampledFrom([]int{0, 31, 43, 48, 79, 94}).Draw(t, "xid")), &xid, 1, telemetry.GPUHasXID)
			say("DCGM_FI_DEV_GPU_RECOVERY_ACTION", number("recovery", 7), &recovery, 1, telemetry.GPUHasRecovery)
			g.XID, g.Recovery = int(xid), telemetry.RecoveryAction(recovery)
			if rapid.Bool().Draw(t, "chosen") {
				chosen, selection = append(chosen, g), append(selection, g.ID)
			}
		}
		if len(selection) == 0 {
			return // would choose all
		}
		var want telemetry.Sample
		want.SetGPUs(chosen)
		if got, _ := gpu(page.String(), selection...); got != want {
			t.Fatalf("of %q\n%sgot  %+v\nwant %+v", selection, page.String(), got, want)
		}
	})
}
