package serve

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer/xgb"
)

func TestModelByFlags(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	pipe, sparse := filepath.Join(dir, "pipe"), file("sparse", nil)
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(sparse, 1<<40); err != nil {
		t.Fatal(err)
	}
	shipped, err := os.ReadFile("../../scorer/xgb/model.ubj")
	if err != nil {
		t.Fatal(err)
	}
	trees, err := xgb.Shipped()
	if err != nil {
		t.Fatal(err)
	}
	digest := trees.Info().Digest[:12]
	for _, c := range []struct {
		name, scorer, file, digest, fault string
	}{
		{"nothing said", "", "", "", ""},
		{"formula", "formula", "", "", ""},
		{"the shipped model", "xgb", "", digest, ""},
		{"a file", "xgb", file("model.ubj", shipped), digest, ""},
		{"a file for the formula", "formula", file("model.ubj", shipped), "", "accepted: a file together with --scorer xgb"},
		{"no such scorer", "llm", "", "", `scorer "llm"; accepted: formula, xgb`},
		{"no such file", "xgb", filepath.Join(dir, "none"), "", "none: no such file"},
		{"half a file", "xgb", file("half", shipped[:len(shipped)/2]), "", "half"},
		{"an empty file", "xgb", file("empty", nil), "", "empty"},
		{"a folder", "xgb", dir, "", "found a directory; accepted: a regular file"},
		{"a pipe that nobody writes to", "xgb", pipe, "", "found a pipe; accepted: a regular file"},
		{"a device without an end", "xgb", "/dev/zero", "", "found a device; accepted: a regular file"},
		{"a file that is too large", "xgb", sparse, "", "more than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := loadModel(c.scorer, c.file)
			if c.fault != "" {
				if err == nil || !strings.Contains(err.Error(), c.fault) {
					t.Errorf("error %v, want %q", err, c.fault)
				}
				return
			}
			if err != nil || m.digest != c.digest {
				t.Errorf("digest %q, want %q; %v", m.digest, c.digest, err)
			}
		})
	}
}

// TestModelFileIsReadAnewWhenItChanges: a good file takes effect, a bad one
// changes nothing and is reported.
func TestModelFileIsReadAnewWhenItChanges(t *testing.T) {
	shipped, err := os.ReadFile("../../scorer/xgb/model.ubj")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "model.ubj")
	put := func(data []byte) {
		t.Helper()
		if err := os.WriteFile(path+".next", data, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".next", path); err != nil {
			t.Fatal(err)
		}
	}
	put(shipped)
	s, err := New(Options{Config: testConfig(t), Scorer: ScorerXGB, ModelPath: path})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	defer func() { stop(); <-ended }()
	await := func(what string, holds func() bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !holds(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal(what)
			}
		}
	}
	first := s.Fleet().Model
	if first == "" {
		t.Fatal("the fleet names no model")
	}
	await("no tick", func() bool { return s.Fleet().Tick > 1 })
	put(append([]byte("{"), shipped...))
	await("the bad file was not reported", s.modelRefused.Load)
	if got := s.Fleet(); got.Model != first || got.Scorer != ScorerXGB {
		t.Errorf("scorer %s/%s after a bad file, want %s/%s", got.Scorer, got.Model, ScorerXGB, first)
	}
	put(otherModel(t, shipped))
	await("the good file was not taken", func() bool { return !s.modelRefused.Load() && s.Fleet().Model != first })
}

// otherModel is the same model with another digest: one attribute's text
// differs.
func otherModel(t *testing.T, shipped []byte) []byte {
	t.Helper()
	other := strings.Replace(string(shipped), "gap_1s", "gap_2s", 1)
	if other == string(shipped) {
		t.Fatal("the model names no target")
	}
	return []byte(other)
}
