package xgb

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"
)

// versions are the libraries that golden.py was run with.
var versions = []string{"1.7.4", "2.1.4", "3.0.5", "3.2.0", "3.4.1"}

const goldenFeatures = 17

// manifest is what golden.py says of one version's files.
type manifest struct {
	Cases []goldenCase `json:"cases"`
	// BaseScores are objective, text of the base score, bits of the margin.
	BaseScores []baseScoreCase `json:"base_scores"`
}

type goldenCase struct {
	Name       string `json:"name"`
	Iterations int    `json:"iterations"`
	Seed       uint64 `json:"seed"`
	Rows       int    `json:"rows"`
	Digest     string `json:"digest"`
}

type baseScoreCase struct {
	objective, text string
	bits            uint32
}

func (c *baseScoreCase) UnmarshalJSON(b []byte) error {
	return json.Unmarshal(b, &[]any{&c.objective, &c.text, &c.bits})
}

func unzip(tb testing.TB, path ...string) []byte {
	tb.Helper()
	f, err := os.Open(filepath.Join(append([]string{"testdata"}, path...)...))
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	data, err := io.ReadAll(z)
	if err != nil {
		tb.Fatal(err)
	}
	return data
}

func readManifest(tb testing.TB, version string) (m manifest) {
	tb.Helper()
	if err := json.Unmarshal(unzip(tb, version, "manifest.json.gz"), &m); err != nil {
		tb.Fatal(err)
	}
	return m
}

// splitmix64 is the generator of golden.py.
func splitmix64(seed, position uint64) uint64 {
	z := position*0x9E3779B97F4A7C15 + seed*0xD1B54A32D192ED03
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// makeRows repeats golden.py's rows.
func makeRows(seed uint64, rows int) [][goldenFeatures]float32 {
	out := make([][goldenFeatures]float32, rows)
	for r := range out {
		for f := range goldenFeatures {
			u := splitmix64(seed, uint64(r*goldenFeatures+f+1))
			k := u & 0xFFFFFFFF
			var v float32
			switch f % 5 {
			case 0:
				v = float32(k%101) / 100
			case 1:
				v = float32(k % 40)
			case 2:
				v = float32(k%257)/256 - 0.25
			case 3:
				v = float32(k&0xFFFFFF)/(1<<23) - 1
			case 4:
				v = float32(k % 4)
			}
			if u>>60 == 0 || r%97 == 0 {
				v = nan
			}
			out[r][f] = v
		}
	}
	return out
}

func digestRows(rows [][goldenFeatures]float32) string {
	h := sha256.New()
	for i := range rows {
		for _, v := range rows[i] {
			bits := math.Float32bits(v)
			if v != v {
				bits = 0x7fc00000 // numpy's
			}
			h.Write(binary.LittleEndian.AppendUint32(nil, bits))
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// TestMarginsHaveTheBitsOfXGBoost compares with predict(output_margin=True) of
// each library version, over both encodings.
func TestMarginsHaveTheBitsOfXGBoost(t *testing.T) {
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			stored := unzip(t, version, "margins.f32.gz")
			total := 0
			for _, c := range readManifest(t, version).Cases {
				rows := makeRows(c.Seed, c.Rows)
				if got := digestRows(rows); got != c.Digest {
					t.Fatalf("%s: the generators differ: %s, golden.py %s", c.Name, got, c.Digest)
				}
				want := stored[:4*c.Rows]
				stored = stored[4*c.Rows:]
				for _, form := range []string{"json", "ubj"} {
					m, err := Load(unzip(t, version, c.Name+"."+form+".gz"), LoadOptions{Iterations: c.Iterations})
					if err != nil {
						t.Fatalf("%s.%s: %v", c.Name, form, err)
					}
					compare(t, c.Name+"."+form, m, rows, want)
				}
				total += c.Rows
			}
			if len(stored) != 0 {
				t.Errorf("%d bytes of margins left over", len(stored))
			}
			if total < 20_000 {
				t.Errorf("%d rows; want at least 20,000", total)
			}
		})
	}
}

func compare(t *testing.T, name string, m *Model, rows [][goldenFeatures]float32, want []byte) {
	t.Helper()
	bad := 0
	for i := range rows {
		wantBits := binary.LittleEndian.Uint32(want[4*i:])
		if got := m.Margin(rows[i][:]); math.Float32bits(got) != wantBits {
			if bad++; bad <= 3 {
				t.Errorf("%s row %d: margin %v (%08x), XGBoost %v (%08x)", name, i, got, math.Float32bits(got),
					math.Float32frombits(wantBits), wantBits)
			}
		}
	}
	if bad > 0 {
		t.Errorf("%s: %d of %d margins differ", name, bad, len(rows))
	}
}

// TestInterceptFollowsXGBoost sweeps 200 base scores per objective and version.
// The log odds may differ in the last bit where the C library's logf is not
// rounded correctly (glibc: up to 0.82 units in the last place).
func TestInterceptFollowsXGBoost(t *testing.T) {
	for _, version := range versions {
		var info Info
		if _, err := fmt.Sscanf(version, "%d.%d.%d", &info.Version[0], &info.Version[1], &info.Version[2]); err != nil {
			t.Fatal(err)
		}
		off, cases := 0, readManifest(t, version).BaseScores
		for _, c := range cases {
			p, err := baseScore(c.text, c.objective)
			if err != nil {
				t.Fatalf("%s: %v", version, err)
			}
			info.Objective, info.BaseScore = c.objective, p
			got, want := intercept(info), math.Float32frombits(c.bits)
			switch {
			case got == want: // −0 and 0 alike: the first leaf added makes them so
			case c.objective == logistic && (math.Nextafter32(got, want) == want):
				off++
			default:
				t.Errorf("%s %s base_score %s: intercept %v, XGBoost %v", version, c.objective, c.text, got, want)
			}
		}
		if len(cases) != 400 || off > 6 {
			t.Errorf("%s: %d of %d intercepts differ in the last bit; want at most 6 of 400", version, off, len(cases))
		}
	}
}

// oracle is a slow second implementation: it walks the tree of the decoded JSON
// along its pointers, and shares no code with the loader.
type oracle struct {
	Learner struct {
		GradientBooster struct {
			Model struct{ Trees []oracleTree }
		} `json:"gradient_booster"`
	}
}

type oracleTree struct {
	Left       []int     `json:"left_children"`
	Right      []int     `json:"right_children"`
	Indices    []int     `json:"split_indices"`
	Conditions []float32 `json:"split_conditions"`
	Default    []int     `json:"default_left"`
}

func (t *oracleTree) leaf(x []float32) float32 {
	i := 0
	for t.Left[i] != -1 {
		v := x[t.Indices[i]]
		if v < t.Conditions[i] || v != v && t.Default[i] == 1 {
			i = t.Left[i]
		} else {
			i = t.Right[i]
		}
	}
	return t.Conditions[i]
}

func newOracle(tb testing.TB, data []byte) oracle {
	tb.Helper()
	var o oracle
	if err := json.Unmarshal(data, &o); err != nil {
		tb.Fatal(err)
	}
	return o
}

func (o *oracle) margin(intercept float32, x []float32) float32 {
	sum := intercept
	for i := range o.Learner.GradientBooster.Model.Trees {
		sum += o.Learner.GradientBooster.Model.Trees[i].leaf(x)
	}
	return sum
}

// TestMarginFollowsTheTreeOnEdges tries the rows on which a layout goes wrong:
// each threshold itself, its neighbours, infinities, both zeros, missing values,
// and rows too short or too long.
func TestMarginFollowsTheTreeOnEdges(t *testing.T) {
	for _, name := range []string{"depth4", "depth5", "depth6", "depth8", "leaf"} {
		data := unzip(t, "3.2.0", name+".json.gz")
		m, err := Load(data, LoadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		o := newOracle(t, data)
		base := makeRows(77, 8)
		check := func(x []float32) {
			full := make([]float32, goldenFeatures)
			for i := range full {
				full[i] = nan
			}
			copy(full, x)
			if got, want := m.Margin(x), o.margin(m.intercept, full); got != want {
				t.Fatalf("%s %v: margin %v, walk %v", name, x, got, want)
			}
		}
		for _, tree := range o.Learner.GradientBooster.Model.Trees {
			for i, c := range tree.Conditions {
				if tree.Left[i] == -1 {
					continue
				}
				for _, v := range []float32{c, math.Nextafter32(c, inf), math.Nextafter32(c, negInf), inf, negInf, 0, negZero, nan} {
					x := base[i%len(base)]
					x[tree.Indices[i]] = v
					check(x[:])
				}
			}
		}
		x := base[1]
		check(x[:0])
		check(x[:5])
		check(append(x[:], 1, 2, 3))
		check(nil)
	}
}

func TestIterationsAreKeptAsAsked(t *testing.T) {
	data := unzip(t, "3.2.0", "early.json.gz")
	all, err := Load(data, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	best, err := Load(data, LoadOptions{Iterations: BestIteration})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := all.Info(), best.Info(); b.Iterations >= a.Iterations || b.TreesInFile != a.Trees ||
		fmt.Sprint(b.Iterations-1) != a.Attributes["best_iteration"] {
		t.Errorf("all %+v, best %+v", a, b)
	}
	three, err := Load(unzip(t, "3.2.0", "forest.json.gz"), LoadOptions{Iterations: 1})
	if err != nil || three.Info().Trees != 3 {
		t.Errorf("one round of a forest of three: %d trees, %v", three.Info().Trees, err)
	}
}

func TestInfoTellsWhatTheFileSays(t *testing.T) {
	for _, form := range []string{"json", "ubj"} {
		data := unzip(t, "3.4.1", "depth4."+form+".gz")
		m, err := Load(data, LoadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got := m.Info()
		digest := sha256.Sum256(data)
		if got.Version != [3]int{3, 4, 1} || got.Trees != 100 || got.Iterations != 100 || got.Depth != 4 || got.NumFeatures != 17 ||
			got.Features[16] != "f_16" || got.Attributes["note"] != "golden" || got.Digest != hex.EncodeToString(digest[:]) ||
			got.Objective != "binary:logistic" || got.Booster != "gbtree" || len(got.Attributes) != 2 {
			t.Errorf("%s: %+v", form, got)
		}
		got.Attributes["note"] = "changed"
		if m.Info().Attributes["note"] != "golden" {
			t.Error("Info gives away the model's own map")
		}
	}
	for _, version := range versions {
		m, err := Load(unzip(t, version, "dart.ubj.gz"), LoadOptions{})
		if err != nil || m.Info().Booster != "dart" {
			t.Errorf("%s: dart is %+v, %v", version, m.Info(), err)
		}
	}
}

// TestBothEncodingsGiveTheSameModel holds nodes and leaves, not only margins.
func TestBothEncodingsGiveTheSameModel(t *testing.T) {
	for _, version := range versions {
		for _, c := range readManifest(t, version).Cases {
			a, errA := Load(unzip(t, version, c.Name+".json.gz"), LoadOptions{})
			b, errB := Load(unzip(t, version, c.Name+".ubj.gz"), LoadOptions{})
			if errA != nil || errB != nil {
				t.Fatalf("%s %s: %v, %v", version, c.Name, errA, errB)
			}
			if fmt.Sprint(a.nodes, a.leaves, a.intercept) != fmt.Sprint(b.nodes, b.leaves, b.intercept) {
				t.Errorf("%s %s: JSON and UBJSON differ", version, c.Name)
			}
		}
	}
	if bytes.Equal(unzip(t, "3.2.0", "depth4.json.gz"), unzip(t, "3.2.0", "depth4.ubj.gz")) {
		t.Error("the golden files are the same")
	}
}
