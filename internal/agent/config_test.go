package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// load reads a config text, with flags over it.
func load(t *testing.T, text string, flags Flags) (*Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load(file, flags)
	if err != nil {
		err = errors.New(strings.ReplaceAll(err.Error(), filepath.Dir(file)+"/", ""))
	}
	return c, err
}

func TestFullConfig(t *testing.T) {
	c, err := Load("testdata/full.yaml", Flags{})
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		Node: "gpu-a",
		Push: Push{Address: fleet.Address{Host: "fairlead.example:9443"},
			TLS: &TLS{CA: "/etc/fairlead/ca.crt", Certificate: "/etc/fairlead/agent.crt", Key: "/etc/fairlead/agent.key", ServerName: "fairlead"}},
		DCGM:     DCGM{Host: "unix:/tmp/nv-hostengine"},
		Interval: 500 * time.Millisecond,
		Status:   fleet.Address{Host: "127.0.0.1:9911"},
		Servers: []Server{
			{Listen: first, Advertise: testConfig().Servers[0].Advertise, MetricsPath: "/metrics"},
			{Listen: addr("[fd00::b]:8001"), Advertise: addr("[fd00::b]:8001"), MetricsPath: "/v1/metrics", GPUs: selectors(t, "GPU-8a3b", "GPU-8a3c/3")},
		},
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got\n%+v\nwant\n%+v", c, want)
	}
}

func TestExampleIsGood(t *testing.T) {
	c, err := Load("../../examples/agent/agent.yaml", Flags{})
	if err != nil {
		t.Fatal(err)
	}
	if c.Node != "gpu-a" || c.Push.TLS == nil || len(c.Servers) != 2 || len(c.Servers[1].GPUs) != 2 {
		t.Errorf("got %+v", c)
	}
}

func TestDefaultsAndFlagsNeedNoFile(t *testing.T) {
	c, err := Load("", Flags{Push: "unix:/run/fairlead/push.sock", Servers: []string{"127.0.0.1:8000=10.0.0.11:8000", "127.0.0.1:8001"}})
	if err != nil {
		t.Fatal(err)
	}
	host, _ := os.Hostname()
	if c.Node != host || c.Push.Address.Path != "/run/fairlead/push.sock" || c.DCGM != (DCGM{Host: "embedded"}) || c.Interval != 200*time.Millisecond ||
		c.Status.Host != "127.0.0.1:9910" || !reflect.DeepEqual(c.Servers, testConfig().Servers) {
		t.Errorf("got %+v", c)
	}
}

func TestFlagsWinOverTheFile(t *testing.T) {
	c, err := Load("testdata/full.yaml", Flags{Node: "other", Push: "unix:/x", DCGM: "off", Status: "127.0.0.1:1", Servers: []string{"127.0.0.1:9"}})
	if err != nil {
		t.Fatal(err)
	}
	if c.Node != "other" || c.Push.Address != (fleet.Address{Path: "/x"}) || c.Push.TLS != nil || !c.DCGM.Off || c.Status.Host != "127.0.0.1:1" ||
		len(c.Servers) != 1 || c.Servers[0].Listen != addr("127.0.0.1:9") || c.Servers[0].MetricsPath != "/metrics" {
		t.Errorf("got %+v", c)
	}
	if c, err = Load("testdata/full.yaml", Flags{Push: "10.0.0.1:9", DCGM: "10.0.0.1:5555"}); err != nil || c.Push.TLS == nil || c.DCGM.Host != "10.0.0.1:5555" {
		t.Errorf("TCP with the file's TLS: %+v, %v", c, err)
	}
}

func TestFaultsOfFlags(t *testing.T) {
	_, err := Load("testdata/full.yaml", Flags{Node: "a b", Push: "here", DCGM: "there", Status: "any", Servers: []string{"8000", "127.0.0.1:8000=x"}})
	want := `--node: found "a b"; accepted: 1 to 253 of a–z, A–Z, 0–9, dot, - and _
--push: found "here"; accepted: unix:/path, IP:port or host:port (a host and a port are needed)
--dcgm: found "there"; accepted: off, embedded, host:port or unix:/path (a host and a port are needed)
--status: found "any"; accepted: IP:port, such as 127.0.0.1:9910
--server: found "8000"; accepted: LISTEN or LISTEN=ADVERTISE, each IP:port, such as 127.0.0.1:8000
--server: found "127.0.0.1:8000=x"; accepted: LISTEN or LISTEN=ADVERTISE, each IP:port, such as 127.0.0.1:8000`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	for _, c := range []struct {
		flags Flags
		says  string
	}{
		{Flags{Push: "10.0.0.1:9", Servers: []string{"127.0.0.1:9"}}, "command line: push: found 10.0.0.1:9, which is not on this host, without tls"},
		{Flags{Servers: []string{"127.0.0.1:9"}}, "command line: push: found nothing; accepted: unix:/path, IP:port or host:port, here or with --push"},
		{Flags{Push: "unix:/x"}, "command line: servers: found none"},
		{Flags{Push: "unix:/x", Servers: []string{"127.0.0.1:9", "127.0.0.1:9"}}, "servers[1].listen: found 127.0.0.1:9, as in servers[0]"},
	} {
		if _, err := Load("", c.flags); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %q", c.flags, err, c.says)
		}
	}
}

func TestMissingFileIsNamed(t *testing.T) {
	var faults fleet.Faults
	if _, err := Load("/nowhere/agent.yaml", Flags{}); err == nil || errors.As(err, &faults) || !strings.Contains(err.Error(), "/nowhere/agent.yaml") {
		t.Errorf("got %v", err)
	}
}

// TestConfigFaults holds what faulty files are answered with against
// testdata/config/faults.golden.
func TestConfigFaults(t *testing.T) {
	text, err := os.ReadFile("testdata/config/faults.txt")
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, c := range strings.Split(string(text), "== ")[1:] {
		name, body, _ := strings.Cut(c, "\n")
		_, err := load(t, body, Flags{})
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
		fmt.Fprintf(&got, "== %s\n%v\n", name, err)
	}
	const golden = "testdata/config/faults.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(got.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got.String(), want)
	}
}

func FuzzConfig(f *testing.F) {
	full, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(full)
	f.Add([]byte("servers: [ { listen: 127.0.0.1:8000 } ]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := &Config{Interval: defaultInterval}
		r := &reader{file: "f", lines: map[string]int{}, flagged: map[string]bool{}}
		r.parse(data, c)
		r.complete(c)
		if faults := r.sorted(); len(faults) > 0 {
			return
		}
		if c.Node == "" || len(c.Servers) == 0 || c.Push.Address == (fleet.Address{}) || c.Interval < minInterval {
			t.Errorf("accepted an incomplete configuration: %+v", c)
		}
		for _, s := range c.Servers {
			if !s.Listen.IsValid() || !s.Advertise.IsValid() || !strings.HasPrefix(s.MetricsPath, "/") {
				t.Errorf("accepted a server %+v", s)
			}
		}
	})
}
