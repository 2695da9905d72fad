package integration

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestWhoLeavesAtOnceHoldsNoPlace: callers who are gone before the decision reaches
// their request take no place from those who stay. Envoy's log tells of such a
// request by its own id alone.
func TestWhoLeavesAtOnceHoldsNoPlace(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, m.addr()))
	if a := s.post(t, chatPath, `{"max_tokens":4}`); a.status != http.StatusOK {
		t.Fatalf("status %d", a.status)
	}
	// Moments of leaving from the first byte on, so that some fall between the
	// decision and its use.
	const callers, each = 8, 150
	var parts sync.WaitGroup
	for k := range callers {
		parts.Go(func() {
			for i := range each {
				c, err := net.Dial("tcp", s.listen)
				if err != nil {
					t.Error(err)
					return
				}
				body := `{"max_tokens":2000}`
				_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %d\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", chatPath, k*each+i, len(body), body)
				if i%10 == 9 { // stays
					_, _ = http.ReadResponse(bufio.NewReader(c), nil)
				}
				pause(t.Context(), time.Duration(i%40)*100*time.Microsecond)
				_ = c.(*net.TCPConn).SetLinger(0)
				_ = c.Close()
			}
		})
	}
	parts.Wait()
	envoytest.Eventually(t, "nobody in flight", func() bool {
		return metric(s.metricsPage(t), "fairlead_level_in_flight") == 0 && s.inFlight() == 0
	})
	page := s.metricsPage(t)
	unapplied, expired := metric(page, "fairlead_request_anomalies_total", `kind="decision_unapplied"`), metric(page, "fairlead_admission_events_total", `kind="expired"`)
	t.Logf("%v decisions didn't reach their requests; %v counted until their leases ended", unapplied, expired)
	if unapplied == 0 {
		t.Errorf("every decision reached its request, of %d callers who left at once", callers*each)
	}
	if expired > unapplied/20 {
		t.Errorf("%v counted until their leases ended, of %v", expired, unapplied)
	}
}
