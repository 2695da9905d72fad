package xgb

import (
	"errors"
	"fmt"
	"math"
)

// leaf is the child index that marks a leaf.
const leaf = -1

// check refuses a tree that is no tree, or one of a kind that is not evaluated,
// and returns its depth. After it, every index that a walk from the root meets
// is in range.
func (t *tree) check(features int) (depth int, err error) {
	n := len(t.left)
	if err := t.checkShape(n); err != nil {
		return 0, err
	}
	// deleted nodes are left in the arrays by pruning; nothing points at them.
	deleted, err := count("num_deleted", or(t.deleted, "0"), 0, n-1)
	if err != nil {
		return 0, err
	}
	w := walk{tree: t, features: features, seen: make([]bool, n)}
	if err := w.visit(0, 0); err != nil {
		return 0, err
	}
	if w.reached != n-deleted {
		return 0, fmt.Errorf("%d of %d nodes can be reached from the root, %d are marked deleted", w.reached, n, deleted)
	}
	return w.depth, nil
}

// checkShape checks what concerns the tree as a whole.
func (t *tree) checkShape(n int) error {
	if n == 0 {
		return errors.New("left_children: no node")
	}
	if _, err := count("size_leaf_vector", or(t.size, "0"), 0, 1); err != nil || len(t.leafWeights) > 0 {
		return errors.New("vector leaves; accepted: one value per leaf")
	}
	if len(t.categories) > 0 {
		return errors.New("categorical splits; accepted: numeric splits")
	}
	for i, kind := range t.types {
		if kind != 0 {
			return fmt.Errorf("split_type[%d]: found %d, a categorical split; accepted: 0, a numeric one", i, kind)
		}
	}
	for _, l := range []struct {
		name string
		len  int
	}{
		{"right_children", len(t.right)}, {"split_indices", len(t.indices)},
		{"split_conditions", len(t.conditions)}, {"default_left", len(t.defaultLeft)},
	} {
		if l.len != n {
			return fmt.Errorf("%s: %d entries for %d nodes", l.name, l.len, n)
		}
	}
	_, err := count("num_nodes", or(t.nodes, fmt.Sprint(n)), n, n)
	return err
}

// walk visits a tree from its root.
type walk struct {
	tree           *tree
	features       int
	seen           []bool
	reached, depth int
}

func (w *walk) visit(i int32, depth int) error {
	t := w.tree
	if i < 0 || int(i) >= len(t.left) {
		return fmt.Errorf("child %d of %d nodes", i, len(t.left))
	}
	if w.seen[i] {
		return fmt.Errorf("node %d has two parents", i)
	}
	if depth > MaxDepth {
		return fmt.Errorf("depth above %d; accepted: up to %d", MaxDepth, MaxDepth)
	}
	w.seen[i] = true
	w.reached++
	w.depth = max(w.depth, depth)
	if !finite(t.conditions[i]) {
		return fmt.Errorf("split_conditions[%d]: found %v; accepted: a finite number", i, t.conditions[i])
	}
	if t.left[i] == leaf && t.right[i] == leaf {
		return nil
	}
	if f := t.indices[i]; f < 0 || int(f) >= w.features {
		return fmt.Errorf("split_indices[%d]: found %d; accepted: 0 to %d", i, f, w.features-1)
	}
	if d := t.defaultLeft[i]; d != 0 && d != 1 {
		return fmt.Errorf("default_left[%d]: found %d; accepted: 0, 1", i, d)
	}
	if err := w.visit(t.left[i], depth+1); err != nil {
		return err
	}
	return w.visit(t.right[i], depth+1)
}

// build checks the trees and lays them out for [Model.Margin].
func (m *Model) build(trees []tree, weights []float32) error {
	for i := range trees {
		depth, err := trees[i].check(m.features)
		if err != nil {
			return fmt.Errorf("learner.gradient_booster.model.trees[%d]: %w", i, err)
		}
		m.depth = max(m.depth, depth)
	}
	size, n := 1<<m.depth, (len(trees)+lanes-1)/lanes*lanes
	m.nodes, m.leaves = make([]node, n*size), make([]float32, n*size)
	for i := range trees {
		weight := float32(1)
		if weights != nil {
			weight = weights[i]
		}
		p := placer{tree: &trees[i], depth: m.depth, weight: weight, nodes: m.nodes[i*size:][:size], leaves: m.leaves[i*size:][:size]}
		p.place(0, 1, 0)
	}
	for i := len(trees) * size; i < len(m.leaves); i++ {
		m.leaves[i] = negZero // x + −0 is x for every x, −0 included
	}
	return m.checkSums()
}

// checkSums refuses a model of which some sum of leaves is no finite number.
func (m *Model) checkSums() error {
	size := 1 << m.depth
	most := math.Abs(float64(m.intercept))
	for first := 0; first < len(m.leaves); first += size {
		largest := 0.0
		for _, v := range m.leaves[first:][:size] {
			largest = max(largest, math.Abs(float64(v)))
		}
		most += largest
	}
	if !(most <= math.MaxFloat32/2) {
		return fmt.Errorf("base score and leaves add up to %v; accepted: what float32 can hold", most)
	}
	return nil
}

// placer lays one tree out.
type placer struct {
	tree   *tree
	depth  int
	weight float32
	nodes  []node
	leaves []float32
}

// place puts the file's node i at index heap. A leaf above the last level fills
// all places below it, so that the decisions there do not matter.
func (p *placer) place(i int32, heap, level int) {
	t := p.tree
	if t.left[i] == leaf && t.right[i] == leaf {
		below := p.depth - level
		first := heap<<below - len(p.leaves)
		// The conversion keeps the product from being fused with a later add.
		value := float32(t.conditions[i] * p.weight)
		for k := range 1 << below {
			p.leaves[first+k] = value
		}
		return
	}
	slot := uint32(t.indices[i])
	if t.defaultLeft[i] == 0 {
		slot += MaxFeatures
	}
	p.nodes[heap] = node{threshold: t.conditions[i], slot: slot}
	p.place(t.left[i], 2*heap+1, level+1)
	p.place(t.right[i], 2*heap, level+1)
}
