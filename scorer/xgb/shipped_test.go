package xgb

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/fairlead-proxy/fairlead/scorer/features"
)

// TestShippedModelFitsTheFeatures guards against a change of the features without
// a model trained on them.
func TestShippedModelFitsTheFeatures(t *testing.T) {
	m, err := Shipped()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Risk(m, "xgb"); err != nil {
		t.Error(err)
	}
	if info := m.Info(); info.Trees > 100 || info.Depth > 4 || info.Objective != logistic {
		t.Errorf("shipped model %+v; the evaluator's budget is 100 trees of depth 4", info)
	}
}

// TestShippedModelHasTheMarginsOfItsTraining compares with what the library that
// trained it gave: rows of 17 features and a margin.
func TestShippedModelHasTheMarginsOfItsTraining(t *testing.T) {
	m, err := Shipped()
	if err != nil {
		t.Fatal(err)
	}
	data := unzip(t, "shipped.f32.gz")
	const width = 4 * (features.Count + 1)
	if len(data) < 500*width || len(data)%width != 0 {
		t.Fatalf("%d bytes of rows", len(data))
	}
	bad := 0
	for row := range slices.Chunk(data, width) {
		var x features.Vector
		for i := range x {
			x[i] = math.Float32frombits(binary.LittleEndian.Uint32(row[4*i:]))
		}
		if math.Float32bits(m.Margin(x[:])) != binary.LittleEndian.Uint32(row[4*features.Count:]) {
			bad++
		}
	}
	if bad > 0 {
		t.Errorf("%d of %d margins differ", bad, len(data)/width)
	}
}

// TestTrainingDropsWholeSources compares the lists in scorer/train/fit.py with
// the sources that scorer/features declares.
func TestTrainingDropsWholeSources(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "train", "fit.py"))
	if err != nil {
		t.Fatal(err)
	}
	for name, source := range map[string]features.Source{"ENGINE": features.FromEngine, "GPU": features.FromGPU} {
		list := regexp.MustCompile(`(?s)\n` + name + ` = \((.*?)\)`).FindSubmatch(text)
		if list == nil {
			t.Fatalf("no tuple %s", name)
		}
		var got, want []string
		for _, word := range regexp.MustCompile(`"(\w+)"`).FindAllSubmatch(list[1], -1) {
			got = append(got, string(word[1]))
		}
		for _, f := range features.All {
			if f.Source == source {
				want = append(want, f.Name)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v; scorer/features says %v", name, got, want)
		}
	}
}

// TestCardAndMetricsAreOfTheShippedModel: numbers of another model would be a
// lie.
func TestCardAndMetricsAreOfTheShippedModel(t *testing.T) {
	digest := fmt.Sprintf("%x", sha256.Sum256(shipped))
	if m, err := Shipped(); err != nil || m.Info().Digest != digest {
		t.Errorf("the model's digest is %s, the file's %s (%v)", m.Info().Digest, digest, err)
	}
	text, err := os.ReadFile("metrics.json")
	if err != nil {
		t.Fatal(err)
	}
	var report struct {
		Model struct {
			SHA256 string `json:"sha256"`
			Bytes  int    `json:"bytes"`
		} `json:"model"`
		Data struct {
			Digest string `json:"digest"`
		} `json:"data"`
	}
	if err := json.Unmarshal(text, &report); err != nil {
		t.Fatal(err)
	}
	if report.Model.SHA256 != digest || report.Model.Bytes != len(shipped) {
		t.Errorf("metrics.json is of a model of %d bytes with SHA-256 %s; model.ubj has %d and %s",
			report.Model.Bytes, report.Model.SHA256, len(shipped), digest)
	}
	card, err := os.ReadFile("MODEL_CARD.md")
	if err != nil {
		t.Fatal(err)
	}
	for what, want := range map[string]string{"SHA-256": digest, "digest": report.Data.Digest} {
		found := regexp.MustCompile(what+" `([0-9a-f]{64})`").FindAllSubmatch(card, -1)
		if len(found) != 1 || string(found[0][1]) != want {
			t.Errorf("MODEL_CARD.md has %d times the word %s with a digest (%s); want once, with %s", len(found), what, found, want)
		}
	}
}
