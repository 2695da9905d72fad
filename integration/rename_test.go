package integration

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// answersByKind are the answers that callers got while a config changed.
type answersByKind struct {
	mu        sync.Mutex
	odd       []string // not 200, or left to Envoy with ext_proc's word
	unsteered int64    // without a decision
	sent      atomic.Int64
}

func (k *answersByKind) note(a answer, err error) {
	k.sent.Add(1)
	k.mu.Lock()
	defer k.mu.Unlock()
	decided := a.header.Get("X-Fairlead-Decision") != ""
	switch {
	case err != nil || a.status != http.StatusOK || decided && a.header.Get("X-Route-Strategy") != "dynamic":
		k.odd = append(k.odd, fmt.Sprintf("status %d, strategy %q, %v: %.200s", a.status, a.header.Get("X-Route-Strategy"), err, a.body))
	case !decided:
		k.unsteered++
	}
}

// expect: all were served, and by a decision, save those for which Envoy did not
// wait any longer, as it may on a loaded machine.
func (k *answersByKind) expect(t *testing.T, e *envoytest.Envoy) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, odd := range k.odd {
		if i == 10 {
			break
		}
		t.Error(odd)
	}
	late, _ := e.Stat("http.fairlead.ext_proc.failure_mode_allowed")
	if len(k.odd) > 0 || k.unsteered > late {
		t.Errorf("of %d answers %d were odd, and %d had no decision, of which Envoy knows %d", k.sent.Load(), len(k.odd), k.unsteered, late)
	}
}

// changing runs serve under load, and each of the configs in turn until its pool has
// had requests.
func changing(t *testing.T, servers [2]*modelServer, configs func(listen string) []change) {
	listen := envoytest.FreeAddr(t).String()
	turns := configs(listen)
	s := &served{place: newPlace(t, turns[len(turns)-1].config), with: wide(t)}
	for _, m := range servers {
		m.answerWith(taking(5 * time.Millisecond))
	}
	s.process = s.serve(t)
	s.envoy, s.listen = s.sidecar(t)
	waitExtProc(s.envoy)
	var got answersByKind
	var parts sync.WaitGroup
	stop := make(chan struct{})
	for range 16 {
		parts.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					got.note(ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":16}`, false))
					pause(t.Context(), 5*time.Millisecond)
				}
			}
		})
	}
	end := sync.OnceFunc(func() { close(stop); parts.Wait() })
	defer end()
	for range 3 {
		for _, turn := range turns {
			finish := halfSent(t, s.listen)
			before, _ := s.envoy.Stat("cluster." + turn.pool + ".upstream_rq_total")
			s.write(t, "", turn.config)
			s.envoy.WaitStat("cluster."+turn.pool+".upstream_rq_total", func(n int64) bool { return n >= before+40 })
			got.note(finish())
		}
	}
	end()
	got.expect(t, s.envoy)
}

// change is a config, and the pool that its route goes to.
type change struct{ pool, config string }

// halfSent sends the headers of a request and half of its body, and returns a
// function that sends the rest.
func halfSent(t *testing.T, address string) (finish func() (answer, error)) {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	const body = `{"max_tokens":16}`
	_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", chatPath, len(body), body[:8])
	return func() (answer, error) {
		if _, err := io.WriteString(c, body[8:]); err != nil {
			return answer{}, err
		}
		return answerOn(c)
	}
}

// TestARenamedPoolFailsNoRequest renames a route's pool there and back. Requests that
// Envoy took under the old routes go to a cluster that no route has any longer.
func TestARenamedPoolFailsNoRequest(t *testing.T) {
	servers := [2]*modelServer{newModelServer(t), newModelServer(t)}
	changing(t, servers, func(listen string) (turns []change) {
		for _, name := range []string{"bigger", "big"} {
			turns = append(turns, change{name, strings.ReplaceAll(fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [ chat ] }
pools:
  - { name: POOL, endpoints: [ { address: %q }, { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: POOL }
`, listen, servers[0].addr(), servers[1].addr()), "POOL", name)})
		}
		return turns
	})
}

// TestARouteThatGoesToAnotherPoolKeepsDeciding moves a route between pools that both
// stay: for a moment Envoy's routes are ahead of the plan, or behind it.
func TestARouteThatGoesToAnotherPoolKeepsDeciding(t *testing.T) {
	servers := [2]*modelServer{newModelServer(t), newModelServer(t)}
	changing(t, servers, func(listen string) (turns []change) {
		for _, name := range []string{"b", "a"} {
			turns = append(turns, change{name, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
  - { name: b, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: %s }
`, listen, servers[0].addr(), servers[1].addr(), name)})
		}
		return turns
	})
}
