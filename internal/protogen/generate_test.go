package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCommittedCodeIsWhatGenerationYields finds a .proto file that was edited
// without `go generate`, and generated code that was edited by hand.
func TestCommittedCodeIsWhatGenerationYields(t *testing.T) {
	const file = "../../telemetry/push/pushv1/push.proto"
	out := t.TempDir()
	if err := Generate(file, out); err != nil {
		t.Fatal(err)
	}
	fresh, err := filepath.Glob(filepath.Join(out, "*"))
	if err != nil || len(fresh) != len(plugins) {
		t.Fatalf("generated %v, %v", fresh, err)
	}
	for _, f := range fresh {
		want, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(filepath.Dir(file), filepath.Base(f)))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what %s yields; run go generate ./telemetry/push/...", filepath.Base(f), file)
		}
	}
}

func TestFaultsOfTheFileAreNamed(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "bad.proto")
	if err := os.WriteFile(file, []byte("syntax = \"proto3\";\nmessage A { B b = 1; }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Generate(file, ""); err == nil || !strings.Contains(err.Error(), "in no Go module") {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module m\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Generate(file, ""); err == nil || !strings.Contains(err.Error(), "bad.proto:2:13") {
		t.Errorf("got %v", err)
	}
}
