package integration

import (
	"fmt"
	"slices"
	"testing"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestBodyCorpusThroughServe sends every row through the whole of serve, whose
// metrics tell where budgets came from and whose token limit tells their size.
func TestBodyCorpusThroughServe(t *testing.T) {
	m := newModelServer(t)
	const perDay = 1_000_000_000_000
	p := newPlace(t, corpusConfig(t, m, perDay))
	p.serve(t)
	e, listen := p.sidecar(t)
	waitExtProc(e)
	with := wide(t)
	for i, row := range corpus(t) {
		headers := row.headers
		for try := range 5 {
			// Each is another client: what is left is the day's tokens less these.
			row.headers = append(slices.Clip(headers), "authorization", fmt.Sprintf("Bearer corpus-%d-%d", i, try))
			label := fmt.Sprintf("source=%q", row.source)
			before := metric(p.metricsPage(t), "fairlead_budgets_total", label)
			a := row.send(t, with, listen, m)
			if a.header.Get("X-Route-Strategy") != "dynamic" && try < 4 {
				continue // ext_proc was late on a loaded machine
			}
			if n := metric(p.metricsPage(t), "fairlead_budgets_total", label) - before; n != 1 {
				t.Errorf("%s: %v more budgets from %s; want one", row.name, n, row.source)
			}
			input := int64(0)
			if row.how != chunked {
				input = min(int64(len(row.body))/4, 1<<20)
			}
			want := perDay - input - max(row.n, 1)*int64(row.budget)
			if got := whole(a.header, "x-ratelimit-remaining-tokens"); row.how != byteForByte && got != want {
				t.Errorf("%s: %d tokens left, want %d: %d reserved, want %d", row.name, got, want, perDay-got, perDay-want)
			}
			break
		}
	}
}

func corpusConfig(t *testing.T, m *modelServer, tokensPerDay int64) string {
	return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [chat] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, defaultMaxTokens: %d }
limits:
  - { name: daily, tokens: %d/day }
`, envoytest.FreeAddr(t), m.addr(), corpusDefault, tokensPerDay)
}
