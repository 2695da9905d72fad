package layers

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const module = "github.com/fairlead-proxy/fairlead/"

// allowed lists, per package, which of our packages its code (tests aside) may
// import. A package that is not listed may import nothing of ours, so a new
// package needs a line here.
var allowed = map[string][]string{
	"fleet":                  {},
	"fleet/wire":             {},
	"telemetry":              {"fleet"},
	"telemetry/scrape":       {"telemetry", "fleet"},
	"telemetry/sim":          {"telemetry", "telemetry/sim/engine", "fleet"},
	"telemetry/sim/engine":   {},
	"telemetry/dcgm":         {"telemetry"},
	"telemetry/push":         {"telemetry", "telemetry/push/pushv1", "fleet"},
	"telemetry/push/pushv1":  {},
	"scorer":                 {"telemetry", "fleet"},
	"scorer/features":        {"scorer", "telemetry"},
	"scorer/xgb":             {"scorer", "scorer/features", "telemetry", "fleet"},
	"plan":                   {"fleet"},
	"admission":              {"fleet", "fleet/wire"},
	"admission/ratelimit":    {"admission", "fleet"},
	"envoy":                  {"fleet", "fleet/wire"},
	"envoy/bootstrap":        {"envoy", "fleet", "fleet/wire"},
	"xds":                    {"envoy", "fleet", "fleet/wire", "xds/rollout"},
	"xds/rollout":            {"fleet"},
	"extproc":                {"plan", "admission", "fleet", "fleet/wire", "extproc/retryafter"},
	"extproc/accesslog":      {"plan", "fleet", "fleet/wire", "extproc/retryafter"},
	"extproc/retryafter":     {"fleet/wire"},
	"admin":                  {},
	"examples":               {},
	"examples/quickstart":    {},
	"examples/limits":        {},
	"examples/sidecar":       {},
	"integration":            {"*"},
	"integration/bench":      {"*"},
	"integration/bench/peer": {"*"},
	"cmd/fairlead":           {"*"},
	"internal/*":             {"*"},
}

// onlyIn lists the packages that may import a module of others, and why the
// rest may not.
var onlyIn = []struct {
	prefix  string
	allowed []string
	reason  string
}{
	{"github.com/envoyproxy/go-control-plane", []string{"envoy", "envoy/bootstrap", "xds", "extproc", "extproc/accesslog", "integration", "integration/bench", "integration/bench/peer", "internal/envoytest"},
		"Envoy's protos stay at the edge"},
	{"github.com/redis/rueidis", []string{"admission/ratelimit"}, "only shared limits need a Redis"},
	{"github.com/NVIDIA/go-dcgm", []string{"telemetry/dcgm"}, "needs cgo and can end the process"},
	{"gonum.org/v1/plot", []string{"internal/simulate"}, "draws charts; nothing that serves needs it"},
	{"github.com/prometheus/common", []string{}, "a test oracle; our scanner reads metrics pages"},
}

// forbiddenInCore are imports that the pure core must not have.
var forbiddenInCore = map[string]string{
	"net/http": "I/O", "os": "I/O", "log/slog": "logging", "log": "logging",
	"google.golang.org/grpc": "I/O", "go.opentelemetry.io/otel": "metrics",
}

// httpNames matches uses of net/http; the pure core may use its constants for
// statuses and methods, which are no I/O.
var httpNames = regexp.MustCompile(`\bhttp\.([A-Z]\w*)`)

func usesOnlyHTTPConstants(t *testing.T, file string) bool {
	t.Helper()
	source, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range httpNames.FindAllStringSubmatch(string(source), -1) {
		if !strings.HasPrefix(m[1], "Status") && !strings.HasPrefix(m[1], "Method") || m[1] == "StatusText" {
			return false
		}
	}
	return true
}

var pureCore = []string{"plan", "scorer", "scorer/features", "scorer/xgb", "envoy", "envoy/bootstrap"}

func TestImportsFollowTheLayers(t *testing.T) {
	eachFile(t, func(pkg, file string, imports []string) {
		if strings.HasSuffix(file, "_test.go") {
			return
		}
		for _, imp := range imports {
			if own, ok := strings.CutPrefix(imp, module); ok && !mayImport(pkg, own) {
				t.Errorf("%s: package %s may not import %s (ARCHITECTURE.md, \"Who may import what\")", file, pkg, own)
			}
			for _, rule := range onlyIn {
				if strings.HasPrefix(imp, rule.prefix) && !contains(rule.allowed, pkg) {
					t.Errorf("%s: package %s may not import %s: %s", file, pkg, imp, rule.reason)
				}
			}
			if imp == "net/http" && contains(pureCore, pkg) && usesOnlyHTTPConstants(t, file) {
				continue
			}
			if why, bad := forbiddenInCore[imp]; bad && contains(pureCore, pkg) {
				t.Errorf("%s: package %s is pure and may not import %s: %s", file, pkg, imp, why)
			}
		}
	})
}

func TestPureCoreStartsNoGoroutineAndReadsNoClock(t *testing.T) {
	eachFile(t, func(pkg, file string, _ []string) {
		if strings.HasSuffix(file, "_test.go") || !contains(pureCore, pkg) {
			return
		}
		source, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, bad := range []string{"time.Now(", "\tgo func", "time.Sleep("} {
			if strings.Contains(string(source), bad) {
				t.Errorf("%s: %q in the pure core", file, strings.TrimSpace(bad))
			}
		}
	})
}

func TestEveryPackageSaysWhatItOwns(t *testing.T) {
	documented, seen := map[string]bool{}, map[string]bool{}
	eachFile(t, func(pkg, file string, _ []string) {
		if strings.HasSuffix(file, "_test.go") {
			return
		}
		seen[pkg] = true
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if parsed.Doc != nil {
			documented[pkg] = true
		}
	})
	for pkg := range seen {
		if !documented[pkg] {
			t.Errorf("package %s has no package comment", pkg)
		}
	}
}

const root = "../.."

// eachFile calls f for every Go file with its package folder, both relative to
// the repository's root.
func eachFile(t *testing.T, f func(pkg, file string, imports []string)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata" || d.Name() == "shared") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		var imports []string
		for _, spec := range parsed.Imports {
			imports = append(imports, strings.Trim(spec.Path.Value, `"`))
		}
		file, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		f(filepath.ToSlash(filepath.Dir(file)), file, imports)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func mayImport(pkg, imp string) bool {
	key := pkg
	if strings.HasPrefix(pkg, "internal/") {
		key = "internal/*"
	}
	list := allowed[key]
	return contains(list, "*") || contains(list, imp)
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}
