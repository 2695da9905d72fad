package bootstrap

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/fairlead-proxy/fairlead/fleet"
)

var update = flag.Bool("update", false, "write the golden files anew")

func options() Options {
	return Options{
		NodeID: "edge-1", Group: "edge", Listen: netip.MustParseAddrPort("127.0.0.1:9001"),
		XDS:   []fleet.Address{{Path: "/run/fairlead/xds.sock"}},
		Admin: fleet.Address{Host: "127.0.0.1:9901"},
	}
}

func TestBootstrapsMatchTheGoldenFiles(t *testing.T) {
	two := options()
	two.XDS = []fleet.Address{{Host: "10.0.0.1:18000"}, {Host: "[fd00::1]:18000"}}
	two.Admin = fleet.Address{Path: "/run/fairlead/admin.sock"}
	none := options()
	none.Admin = fleet.Address{}
	none.Zone = "eu-1a"
	for name, o := range map[string]Options{"one": options(), "two": two, "no-admin": none} {
		for _, format := range []string{"yaml", "json"} {
			got, err := Render(o, format)
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+"."+format)
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
				continue
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s differs; look at it after `go test ./envoy/bootstrap -update`; got\n%s", golden, got)
			}
		}
	}
}

func TestFormatsSayTheSame(t *testing.T) {
	asYAML, err := Render(options(), "yaml")
	if err != nil {
		t.Fatal(err)
	}
	asJSON, err := Render(options(), "json")
	if err != nil {
		t.Fatal(err)
	}
	var fromYAML, fromJSON any
	if err := yaml.Unmarshal(asYAML, &fromYAML); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(asJSON, &fromJSON); err != nil {
		t.Fatal(err)
	}
	// Numbers are int in one and float64 in the other.
	again, err := json.Marshal(fromYAML)
	if err != nil {
		t.Fatal(err)
	}
	var viaYAML any
	if err := json.Unmarshal(again, &viaYAML); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(viaYAML, fromJSON) {
		t.Errorf("yaml\n%s\njson\n%s", asYAML, asJSON)
	}
}

func TestBuildTellsAllFaults(t *testing.T) {
	_, err := Build(Options{DrainTime: -1})
	for _, says := range []string{"no node id", "no group", "no listening address", "no control plane", "drain time"} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %q", err, says)
		}
	}
	o := options()
	o.XDS = append(o.XDS, fleet.Address{Host: "somewhere:1"})
	if _, err := Build(o); err == nil || !strings.Contains(err.Error(), `control plane 2: found address "somewhere:1"`) {
		t.Errorf("host name: %v", err)
	}
	o = options()
	o.Admin = fleet.Address{Host: "nowhere"}
	if _, err := Build(o); err == nil || !strings.Contains(err.Error(), "admin:") {
		t.Errorf("admin: %v", err)
	}
	for _, zone := range []string{"\xff", strings.Repeat("z", 254)} {
		o = options()
		o.Zone = zone
		if _, err := Build(o); err == nil || !strings.Contains(err.Error(), "zone: found") {
			t.Errorf("zone %q: %v", zone, err)
		}
	}
	if _, err := Render(options(), "toml"); err == nil || !strings.Contains(err.Error(), "yaml, json") {
		t.Errorf("format: %v", err)
	}
}

func TestArgsRoundTheDrainTimeUp(t *testing.T) {
	for drain, want := range map[time.Duration]string{0: "3600", time.Millisecond: "1", 90 * time.Second: "90", 1500 * time.Millisecond: "2"} {
		o := options()
		o.DrainTime = drain
		args := Args(o, "edge.yaml")
		if got := strings.Join(args, " "); got != "-c edge.yaml --drain-time-s "+want+" --disable-hot-restart" {
			t.Errorf("%v: %s", drain, got)
		}
	}
}
