package fleet

import (
	"fmt"
	"strings"
	"testing"
)

// manyEndpoints is a file with one large pool.
func manyEndpoints(n int) []byte {
	var b strings.Builder
	b.WriteString(`apiVersion: fairlead/v1alpha1
kind: Fairlead
groups: [ { name: g, listener: { address: "127.0.0.1:1" }, routes: [ r ] } ]
routes: [ { name: r, match: { prefix: / }, dialect: openai, pool: p } ]
pools:
  - name: p
    endpoints:
`)
	for i := range n {
		fmt.Fprintf(&b, "      - { name: gpu-%d, address: 10.%d.%d.%d:8000, node: node-%d, gpus: [ GPU-%08x ] }\n", i, i>>16, i>>8&255, i&255, i/8, i)
	}
	return []byte(b.String())
}

func BenchmarkParse10000Endpoints(b *testing.B) {
	data := manyEndpoints(10_000)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse("f", data); err != nil {
			b.Fatal(err)
		}
	}
}

func TestLargeFleet(t *testing.T) {
	c, err := Parse("f", manyEndpoints(10_000))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Pools[0].Endpoints[9_999]; got.Name != "gpu-9999" || got.Address.String() != "10.0.39.15:8000" {
		t.Errorf("%+v", got)
	}
}
