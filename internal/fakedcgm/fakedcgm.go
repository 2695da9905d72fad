// Package fakedcgm owns a libdcgm.so.4 without GPUs: a C source that a test
// compiles against the headers of the go-dcgm module, and the script that tells
// it what the node's GPUs say. The code under test goes through the real
// go-dcgm and through dlopen, as it does on a GPU node.
//
// It never runs outside tests, and it models no more of DCGM than fairlead
// calls. What it models it models strictly: values exist only while they are
// watched, watches end with their connection, struct versions must match, and
// two calls at once end the process.
//
// A process finds the library through LD_LIBRARY_PATH, which the loader reads
// only at its start: a test sets it and then executes itself again. [Env] gives
// the variables. The library reads the script anew on each call, so writing the
// file changes what the GPUs say.
//
// # The script
//
// One command a line; a later line for the same thing wins. Entity groups are
// DCGM's: 1 is a GPU, 4 a GPU instance. Values may be blank, notfound,
// notsupported or noperm. Stamps are microseconds.
//
//	gpus N                                     N GPUs, well and busy: every field has a value
//	v GROUP ID FIELD TYPE STATUS AGE VALUE     a value of that age; TYPE is i, d or s
//	at GROUP ID FIELD TYPE STATUS STAMP VALUE  a value with a fixed stamp; @X counts from the loading of the library
//	rm GROUP ID FIELD                          no sample was ever taken (status -14)
//	blank GROUP ID                             every field but the XID is blank, with status 0 and a fresh stamp
//	needwatch FIELD N                          blank until the field was watched N times on this connection
//	unsupported FIELD RC                       watching the field is answered with RC
//	status GPU S                               GPU status: 1 ok, 2 unsupported, 4 lost, 7 detached
//	gone GPU                                   not enumerated
//	mig ENTITY GPU INSTANCE PROFILE SLICES NAME   a GPU instance
//	pid GPU PID MEMORY                         a compute process
//	connect RC                                 connecting is answered with RC
//	call RC                                    each call on a connection is answered with RC
//	generation N                               the host engine's N-th life: connections of others are dead (-21)
//	delay MS                                   how long each call on a connection takes; a changed script ends the wait
//	skew US                                    added to the host engine's clock
//	freeze 1                                   the host engine samples no more: its clock stands
package fakedcgm

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// ScriptVariable names the environment variable that names the script's file.
const ScriptVariable = "FAIRLEAD_FAKEDCGM_SCRIPT"

// EndedVariable names the environment variable that names a file; it is made
// when DCGM is shut down, so that a test sees whether a process did that.
const EndedVariable = "FAIRLEAD_FAKEDCGM_ENDED"

// ErrNoCompiler says that there is no gcc to compile the library with. Tests
// skip on it, except in CI.
var ErrNoCompiler = errors.New("gcc is not installed")

// module is where the headers come from.
const module = "github.com/NVIDIA/go-dcgm"

//go:embed testdata/libdcgm.c
var source []byte

// Build compiles the library into dir and returns its path. It needs gcc and
// the go command, and must run inside fairlead's module.
func Build(dir string) (lib string, err error) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		return "", ErrNoCompiler
	}
	headers, err := headerDir()
	if err != nil {
		return "", err
	}
	c := filepath.Join(dir, "libdcgm.c")
	if err := os.WriteFile(c, source, 0o600); err != nil {
		return "", fmt.Errorf("write the source of the fake libdcgm: %w", err)
	}
	lib = filepath.Join(dir, "libdcgm.so.4")
	// The soname is what go-dcgm opens and what the loader shows in maps.
	args := []string{"-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libdcgm.so.4", "-I", headers, "-o", lib, c}
	if out, err := exec.Command(gcc, args...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile the fake libdcgm: %w\n%s", err, out)
	}
	return lib, nil
}

// headerDir returns the directory of the DCGM headers that go-dcgm ships.
func headerDir() (string, error) {
	// Without the tag dcgm no package imports the module, so a fresh cache has it
	// only once somebody asks.
	if _, err := goTool("mod", "download", module); err != nil {
		return "", fmt.Errorf("fetch %s: %w", module, err)
	}
	dir, err := goTool("list", "-m", "-f", "{{.Dir}}", module)
	if err != nil {
		return "", fmt.Errorf("find the headers of %s: %w", module, err)
	}
	if dir == "" {
		return "", fmt.Errorf("find the headers: the module %s is not downloaded", module)
	}
	return filepath.Join(dir, "pkg", "dcgm"), nil
}

// Env returns the variables with which a process finds the library lib and the
// script at path. They must stand in its environment when it starts.
func Env(lib, path string) []string {
	dirs := filepath.Dir(lib)
	if more := os.Getenv("LD_LIBRARY_PATH"); more != "" {
		dirs += string(filepath.ListSeparator) + more
	}
	return []string{"LD_LIBRARY_PATH=" + dirs, ScriptVariable + "=" + path}
}

// Entity groups, as DCGM numbers them.
const (
	EntityGPU      = 1
	EntityInstance = 4
)

// Fields that scripts set by name; DCGM's numbers.
const (
	FieldUUID           = 54
	FieldName           = 50
	FieldThrottle       = 112
	FieldMargin         = 153
	FieldPowerAverage   = 155
	FieldEnergy         = 156
	FieldPower          = 157
	FieldUtil           = 203
	FieldXID            = 230
	FieldLinkWidth      = 238
	FieldFBTotal        = 250
	FieldFBUsed         = 252
	FieldFBReserved     = 253
	FieldDBE            = 311
	FieldRemapFailed    = 395
	FieldRemapPending   = 396
	FieldGRActive       = 1001
	FieldSMActive       = 1002
	FieldTensorActive   = 1004
	FieldDRAMActive     = 1005
	FieldPCIeTX         = 1009
	FieldPCIeRX         = 1010
	FieldRecoveryAction = 1523
)

// GPU statuses, as DCGM numbers them.
const (
	StatusOK          = 1
	StatusUnsupported = 2
	StatusLost        = 4
	StatusDetached    = 7
)

// Script is what the node's GPUs say. Its setters replace what they set before
// and return the script, so that calls chain. The zero value is not usable; see
// [New]. It must not be used by several goroutines at once.
type Script struct {
	order []string
	lines map[string]string
	xids  int
}

// New returns a script of gpus GPUs that are well and busy.
func New(gpus int) *Script {
	s := &Script{lines: make(map[string]string)}
	return s.set("gpus", "gpus %d", gpus)
}

// UUID is the id of the GPU with the given index, where the script sets no
// other.
func UUID(gpu int) string { return fmt.Sprintf("GPU-fa4e0000-0000-4000-8000-%012d", gpu) }

func (s *Script) set(key, format string, args ...any) *Script {
	if _, ok := s.lines[key]; !ok {
		s.order = append(s.order, key)
	}
	s.lines[key] = fmt.Sprintf(format, args...)
	return s
}

func (s *Script) unset(keys ...string) *Script {
	for _, key := range keys {
		if _, ok := s.lines[key]; !ok {
			continue
		}
		delete(s.lines, key)
		for i, k := range s.order {
			if k == key {
				s.order = append(s.order[:i], s.order[i+1:]...)
				break
			}
		}
	}
	return s
}

func valueKey(group, id, field int) string { return fmt.Sprintf("v %d %d %d", group, id, field) }

// Int sets a whole-number field of a GPU, fresh at each read.
func (s *Script) Int(gpu, field int, value int64) *Script {
	return s.Value(EntityGPU, gpu, field, 'i', 0, 0, fmt.Sprint(value))
}

// Double sets a floating-point field of a GPU, fresh at each read.
func (s *Script) Double(gpu, field int, value float64) *Script {
	return s.Value(EntityGPU, gpu, field, 'd', 0, 0, fmt.Sprint(value))
}

// Text sets a string field of a GPU.
func (s *Script) Text(gpu, field int, value string) *Script {
	return s.Value(EntityGPU, gpu, field, 's', 0, 0, value)
}

// Value sets any field of any entity: kind is i, d or s; age is how old the
// sample is at each read.
func (s *Script) Value(group, id, field int, kind byte, status int, age time.Duration, value string) *Script {
	return s.set(valueKey(group, id, field), "v %d %d %d %c %d %d %s", group, id, field, kind, status, age.Microseconds(), value)
}

// Standing sets a field whose sample keeps one stamp, at after the loading of
// the library: nothing samples it any more.
func (s *Script) Standing(group, id, field int, kind byte, at time.Duration, value string) *Script {
	return s.set(valueKey(group, id, field), "at %d %d %d %c 0 @%d %s", group, id, field, kind, at.Microseconds(), value)
}

// NoData leaves a field without any sample, as before its first one.
func (s *Script) NoData(group, id, field int) *Script {
	return s.set(valueKey(group, id, field), "rm %d %d %d", group, id, field)
}

// Default takes a field's value back to that of a GPU that is well and busy.
func (s *Script) Default(group, id, field int) *Script { return s.unset(valueKey(group, id, field)) }

// XID adds an XID event of a GPU. Each has its own stamp, also within one
// second.
func (s *Script) XID(gpu, code int) *Script {
	s.xids++
	return s.set(fmt.Sprintf("xid %d", s.xids), "at %d %d %d i 0 @%d %d", EntityGPU, gpu, FieldXID, s.xids, code)
}

// Blank makes every field of a GPU blank, with status 0 and a fresh stamp, as
// DCGM's cache shows driver errors; XIDs stay.
func (s *Script) Blank(gpu int) *Script {
	return s.set(fmt.Sprintf("blank %d", gpu), "blank %d %d", EntityGPU, gpu)
}

// Lose makes a GPU fall off the bus: blank, and lost by its status.
func (s *Script) Lose(gpu int) *Script { return s.Blank(gpu).Status(gpu, StatusLost) }

// Restore undoes Blank, Lose, Status and Gone.
func (s *Script) Restore(gpu int) *Script {
	return s.unset(fmt.Sprintf("blank %d", gpu), fmt.Sprintf("status %d", gpu), fmt.Sprintf("gone %d", gpu))
}

// Status sets a GPU's status.
func (s *Script) Status(gpu, status int) *Script {
	return s.set(fmt.Sprintf("status %d", gpu), "status %d %d", gpu, status)
}

// Gone takes a GPU out of the enumeration.
func (s *Script) Gone(gpu int) *Script { return s.set(fmt.Sprintf("gone %d", gpu), "gone %d", gpu) }

// Instance adds a MIG instance: entity is DCGM's id, instance NVML's.
func (s *Script) Instance(entity, gpu, instance, slices int, profile string) *Script {
	return s.set(fmt.Sprintf("mig %d", entity), "mig %d %d %d %d %d %s", entity, gpu, instance, 19, slices, profile)
}

// NoInstances takes all MIG instances away.
func (s *Script) NoInstances() *Script {
	for _, key := range append([]string(nil), s.order...) {
		if strings.HasPrefix(key, "mig ") {
			s.unset(key)
		}
	}
	return s
}

// Process adds a compute process of a GPU.
func (s *Script) Process(gpu, pid int) *Script {
	return s.set(fmt.Sprintf("pid %d %d", gpu, pid), "pid %d %d %d", gpu, pid, 1<<30)
}

// NoProcesses takes all processes away.
func (s *Script) NoProcesses() *Script {
	for _, key := range append([]string(nil), s.order...) {
		if strings.HasPrefix(key, "pid ") {
			s.unset(key)
		}
	}
	return s
}

// NeedWatch keeps a field blank until it was watched times times on one
// connection.
func (s *Script) NeedWatch(field, times int) *Script {
	return s.set(fmt.Sprintf("needwatch %d", field), "needwatch %d %d", field, times)
}

// Unsupported makes watching a field fail with rc.
func (s *Script) Unsupported(field, rc int) *Script {
	return s.set(fmt.Sprintf("unsupported %d", field), "unsupported %d %d", field, rc)
}

// Connect answers connecting with rc; 0 lets it succeed.
func (s *Script) Connect(rc int) *Script { return s.set("connect", "connect %d", rc) }

// Call answers each call on a connection with rc; 0 lets them succeed.
func (s *Script) Call(rc int) *Script { return s.set("call", "call %d", rc) }

// Restart begins the host engine's n-th life: all older connections are dead.
func (s *Script) Restart(n int) *Script { return s.set("generation", "generation %d", n) }

// Delay is how long each call on a connection takes. Writing a script with a
// shorter delay also ends the calls that wait.
func (s *Script) Delay(d time.Duration) *Script {
	return s.set("delay", "delay %d", d.Milliseconds())
}

// Skew shifts the host engine's clock.
func (s *Script) Skew(d time.Duration) *Script { return s.set("skew", "skew %d", d.Microseconds()) }

// Freeze stops the host engine's clock, and with it all sampling.
func (s *Script) Freeze(on bool) *Script {
	if !on {
		return s.unset("freeze")
	}
	return s.set("freeze", "freeze 1")
}

// Write puts the script at path, by renaming, so that the library never reads a
// half of it.
func (s *Script) Write(path string) error {
	var text strings.Builder
	for _, key := range s.order {
		text.WriteString(s.lines[key])
		text.WriteByte('\n')
	}
	temp, err := os.CreateTemp(filepath.Dir(path), ".script-*")
	if err != nil {
		return fmt.Errorf("write the script of the fake libdcgm: %w", err)
	}
	_, err = temp.WriteString(text.String())
	if err = errors.Join(err, temp.Close()); err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		os.Remove(temp.Name())
		return fmt.Errorf("write the script of the fake libdcgm: %w", err)
	}
	return nil
}

// goTool runs a go command and returns what it printed.
func goTool(args ...string) (string, error) {
	out, err := exec.Command("go", args...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(exit.Stderr))
	}
	return strings.TrimSpace(string(out)), err
}
