package xgb

import (
	"fmt"
	"testing"
)

// hundredTrees is a golden model of the given depth, its trees repeated or cut to
// 100.
func hundredTrees(tb testing.TB, depth int) *Model {
	tb.Helper()
	m, err := Load(unzip(tb, "3.2.0", fmt.Sprintf("depth%d.ubj.gz", depth)), LoadOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	whole := len(m.nodes)
	for len(m.nodes) < 100<<depth {
		n := min(m.info.Trees<<depth, whole)
		m.nodes, m.leaves = append(m.nodes, m.nodes[:n]...), append(m.leaves, m.leaves[:n]...)
	}
	m.nodes, m.leaves = m.nodes[:100<<depth], m.leaves[:100<<depth]
	return m
}

func TestMarginAllocatesNothing(t *testing.T) {
	m := hundredTrees(t, 4)
	x := makeRows(1, 2)[1]
	if n := testing.AllocsPerRun(100, func() { sink += m.Margin(x[:]) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

var sink float32

// BenchmarkMargin: 100 trees, 17 features, a different row each time. Budget: 1.1
// µs at depth 4.
func BenchmarkMargin(b *testing.B) {
	rows := makeRows(1, 1024)
	for _, depth := range []int{4, 5, 6} {
		b.Run(fmt.Sprintf("depth%d", depth), func(b *testing.B) {
			m := hundredTrees(b, depth)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				sink += m.Margin(rows[i&1023][:])
				i++
			}
		})
	}
}

// BenchmarkLoad: 100 trees of depth 4.
func BenchmarkLoad(b *testing.B) {
	for _, form := range []string{"json", "ubj"} {
		b.Run(form, func(b *testing.B) {
			data := unzip(b, "3.2.0", "depth4."+form+".gz")
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Load(data, LoadOptions{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
