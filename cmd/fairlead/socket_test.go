package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestOwnSocketsHaveShortPaths, however long the folder for temporary files is.
func TestOwnSocketsHaveShortPaths(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), strings.Repeat("long", 30)))
	if err := os.MkdirAll(os.TempDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	path, remove, err := ownSocket()
	if err != nil || len(path) > longestSocket {
		t.Fatalf("%q, %v", path, err)
	}
	remove()
	if _, err := os.Stat(filepath.Dir(path)); !os.IsNotExist(err) {
		t.Errorf("its folder is left: %v", err)
	}
}
