package fakedcgm

import (
	"debug/elf"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestScriptSaysTheLastOfEach(t *testing.T) {
	path := filepath.Join(t.TempDir(), "script")
	s := New(2).Int(0, FieldUtil, 5).Int(0, FieldUtil, 7).Double(1, FieldPower, 300).XID(1, 79).XID(1, 79).
		Lose(1).Delay(700*time.Millisecond).Skew(-time.Second).Process(0, 12).Instance(7, 0, 1, 2, "2g.20gb")
	want := `gpus 2
v 1 0 203 i 0 0 7
v 1 1 157 d 0 0 300
at 1 1 230 i 0 @1 79
at 1 1 230 i 0 @2 79
blank 1 1
status 1 4
delay 700
skew -1000000
pid 0 12 1073741824
mig 7 0 1 19 2 2g.20gb
`
	check := func(want string) {
		t.Helper()
		if err := s.Write(path); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != want {
			t.Errorf("script\n%s\nwant\n%s", got, want)
		}
	}
	check(want)
	s.Restore(1).NoProcesses().NoInstances().Default(EntityGPU, 0, FieldUtil)
	check("gpus 2\nv 1 1 157 d 0 0 300\nat 1 1 230 i 0 @1 79\nat 1 1 230 i 0 @2 79\ndelay 700\nskew -1000000\n")
}

func TestBuildMakesTheLibraryThatGoDCGMOpens(t *testing.T) {
	lib, err := Build(t.TempDir())
	if errors.Is(err, ErrNoCompiler) && os.Getenv("CI") != "1" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(lib)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if names, err := f.DynString(elf.DT_SONAME); err != nil || !slices.Equal(names, []string{"libdcgm.so.4"}) {
		t.Errorf("soname %q, %v", names, err)
	}
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"dcgmInit", "dcgmConnect_v2", "dcgmConnect_v3", "dcgmStartEmbedded", "dcgmEntitiesGetLatestValues", "errorString"} {
		if !slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == want && s.Section != elf.SHN_UNDEF }) {
			t.Errorf("%s is not exported", want)
		}
	}
}
