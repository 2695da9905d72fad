package xgb

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// BestIteration as [LoadOptions].Iterations keeps the boosting rounds up to the
// best one that early stopping noted in the attribute best_iteration.
const BestIteration = -1

// LoadOptions say how much of a model is used. The zero value takes all of it,
// as Booster.predict does (the scikit-learn wrapper stops at the best
// iteration).
type LoadOptions struct {
	// Iterations is the number of boosting rounds to keep; 0 for all,
	// BestIteration for those up to the best one.
	Iterations int
}

// Load reads a model as save_model wrote it. JSON and UBJSON are told apart by
// the content. The error names the member that is wrong, what was found and what
// is accepted. data is not kept.
func Load(data []byte, o LoadOptions) (*Model, error) {
	m, err := load(data, o)
	if err != nil {
		return nil, fmt.Errorf("XGBoost model: %w", err)
	}
	return m, nil
}

func load(data []byte, o LoadOptions) (*Model, error) {
	r, format, err := open(data)
	if err != nil {
		return nil, err
	}
	var d document
	if err := d.read(r); err != nil {
		return nil, fmt.Errorf("%s: %w", format, err)
	}
	if err := r.end(); err != nil {
		return nil, fmt.Errorf("%s: %w", format, err)
	}
	m, err := d.model(o)
	if err != nil {
		return nil, err
	}
	digest := sha256.Sum256(data)
	m.info.Format, m.info.Digest = format, hex.EncodeToString(digest[:])
	return m, nil
}

// open chooses the reader. Both encodings begin with a brace: in JSON a quote or
// white space follows, in UBJSON the type of a key's length.
func open(data []byte) (reader, string, error) {
	const accepted = "accepted: JSON or UBJSON written by save_model"
	if len(data) > MaxSize {
		return nil, "", fmt.Errorf("%d bytes; accepted: up to %d", len(data), MaxSize)
	}
	text := strings.TrimLeft(string(data[:min(len(data), 64)]), " \t\r\n")
	if len(text) < 2 || text[0] != '{' {
		if strings.HasPrefix(text, "binf") {
			return nil, "", errors.New("the old binary format, which XGBoost 3.1 removed; " + accepted)
		}
		return nil, "", fmt.Errorf("begins with %q; %s", text[:min(len(text), 8)], accepted)
	}
	if numberSize(text[1]) > 0 {
		return &ubjReader{data: data}, "ubjson", nil
	}
	return newJSONReader(data), "json", nil
}

// document is what is read of a file, before anything is checked but its types.
type document struct {
	version []int32
	learner bool

	baseScore, features, classes, targets string
	objective                             string
	names, types                          []string
	attributes                            map[string]string

	booster booster
	// inner is the booster inside dart's, as XGBoost up to 3.2 writes it.
	inner *booster
}

// booster is one gradient_booster member.
type booster struct {
	name                    string
	hasModel                bool
	count, parallel, size   string
	info, indptr            []int32
	trees                   []tree
	weights, weightsInModel []float32
}

// tree is one tree as written.
type tree struct {
	nodes, deleted, size           string
	left, right, indices           []int32
	conditions                     []float32
	defaultLeft, types, categories []int32
	leafWeights                    []float32
}

func (d *document) read(r reader) error {
	return readObject(r, members{
		"version": intoInts(r, &d.version),
		"learner": func() error { d.learner = true; return d.readLearner(r) },
	})
}

func (d *document) readLearner(r reader) error {
	return readObject(r, members{
		"attributes":    func() error { return d.readAttributes(r) },
		"feature_names": intoTexts(r, &d.names),
		"feature_types": intoTexts(r, &d.types),
		"gradient_booster": func() error {
			return d.readBooster(r, &d.booster, true)
		},
		"learner_model_param": func() error {
			return readObject(r, members{
				"base_score":  intoText(r, &d.baseScore),
				"num_feature": intoText(r, &d.features),
				"num_class":   intoText(r, &d.classes),
				"num_target":  intoText(r, &d.targets),
			})
		},
		"objective": func() error {
			return readObject(r, members{"name": intoText(r, &d.objective)})
		},
	})
}

// maxAttributes bounds the attributes that are kept.
const maxAttributes = 256

func (d *document) readAttributes(r reader) error {
	d.attributes = map[string]string{}
	return r.object(func(key string) error {
		if _, ok := d.attributes[key]; ok {
			return inside(key, errors.New("duplicate key"))
		}
		if len(d.attributes) == maxAttributes {
			return fmt.Errorf("more than %d attributes", maxAttributes)
		}
		value, err := r.text()
		d.attributes[key] = value
		return inside(key, err)
	})
}

func (d *document) readBooster(r reader, b *booster, outer bool) error {
	known := members{
		"name":  intoText(r, &b.name),
		"model": func() error { b.hasModel = true; return b.readModel(r) },
	}
	if outer {
		known["weight_drop"] = intoFloats(r, &b.weights)
		known["gbtree"] = func() error {
			d.inner = new(booster)
			return d.readBooster(r, d.inner, false)
		}
	}
	return readObject(r, known)
}

func (b *booster) readModel(r reader) error {
	return readObject(r, members{
		"gbtree_model_param": func() error {
			return readObject(r, members{
				"num_trees":         intoText(r, &b.count),
				"num_parallel_tree": intoText(r, &b.parallel),
				"size_leaf_vector":  intoText(r, &b.size),
			})
		},
		"tree_info":        intoInts(r, &b.info),
		"iteration_indptr": intoInts(r, &b.indptr),
		"weight_drop":      intoFloats(r, &b.weightsInModel),
		"trees":            func() error { return b.readTrees(r) },
	})
}

func (b *booster) readTrees(r reader) error {
	return r.array(func(i int) error {
		if i == MaxTrees {
			return fmt.Errorf("more than %d trees", MaxTrees)
		}
		b.trees = append(b.trees, tree{})
		return inside(fmt.Sprintf("[%d]", i), b.trees[i].read(r))
	})
}

func (t *tree) read(r reader) error {
	return readObject(r, members{
		"left_children":    intoInts(r, &t.left),
		"right_children":   intoInts(r, &t.right),
		"split_indices":    intoInts(r, &t.indices),
		"split_conditions": intoFloats(r, &t.conditions),
		"default_left":     intoInts(r, &t.defaultLeft),
		"split_type":       intoInts(r, &t.types),
		"categories_nodes": intoInts(r, &t.categories),
		"leaf_weights":     intoFloats(r, &t.leafWeights),
		"tree_param": func() error {
			return readObject(r, members{
				"num_nodes":        intoText(r, &t.nodes),
				"num_deleted":      intoText(r, &t.deleted),
				"size_leaf_vector": intoText(r, &t.size),
			})
		},
	})
}

func intoText(r reader, to *string) func() error {
	return func() (err error) { *to, err = r.text(); return err }
}

func intoInts(r reader, to *[]int32) func() error {
	return func() (err error) { *to, err = r.ints(); return err }
}

func intoFloats(r reader, to *[]float32) func() error {
	return func() (err error) { *to, err = r.floats(); return err }
}

func intoTexts(r reader, to *[]string) func() error {
	return func() error {
		return r.array(func(i int) error {
			if i == MaxFeatures {
				return fmt.Errorf("more than %d features", MaxFeatures)
			}
			s, err := r.text()
			*to = append(*to, s)
			return inside(fmt.Sprintf("[%d]", i), err)
		})
	}
}

// model checks the document and builds the model.
func (d *document) model(o LoadOptions) (*Model, error) {
	info, err := d.header()
	if err != nil {
		return nil, err
	}
	trees, weights, err := d.trees()
	if err != nil {
		return nil, err
	}
	rounds, err := d.gbtree().rounds()
	if err != nil {
		return nil, err
	}
	if info.Iterations, err = d.iterations(o, len(rounds)-1); err != nil {
		return nil, err
	}
	info.TreesInFile, info.Trees = len(trees), rounds[info.Iterations]
	if weights != nil {
		info.Booster = "dart" // 3.3 writes the name gbtree for both
	}
	m := &Model{info: info, features: info.NumFeatures}
	m.intercept = intercept(info)
	if err := m.build(trees[:info.Trees], weights); err != nil {
		return nil, err
	}
	m.info.Depth = m.depth
	return m, nil
}

// header checks everything but the trees.
func (d *document) header() (Info, error) {
	info := Info{Objective: d.objective, Booster: "gbtree", Features: d.names, Attributes: d.attributes}
	if !d.learner {
		return info, errors.New("no member learner; accepted: what save_model writes")
	}
	if len(d.version) != 3 || d.version[0] < 1 || d.version[0] > 3 || d.version[1] < 0 || d.version[2] < 0 {
		return info, fmt.Errorf("version %v; accepted: XGBoost 1.x to 3.x", d.version)
	}
	for i, v := range d.version {
		info.Version[i] = int(v)
	}
	switch d.booster.name {
	case "gbtree":
	case "dart":
		info.Booster = "dart"
	default:
		return info, fmt.Errorf("learner.gradient_booster.name: found %s; accepted: gbtree, dart", shown(d.booster.name))
	}
	if d.objective != logistic && d.objective != logitRaw {
		return info, fmt.Errorf("learner.objective.name: found %s; accepted: %s, %s", shown(d.objective), logistic, logitRaw)
	}
	if err := d.outputs(); err != nil {
		return info, err
	}
	n, err := count("num_feature", d.features, 1, MaxFeatures)
	if err != nil {
		return info, err
	}
	info.NumFeatures = n
	if len(d.names) != 0 && len(d.names) != n {
		return info, fmt.Errorf("learner.feature_names: %d names for %d features", len(d.names), n)
	}
	if slices.Contains(d.types, "c") {
		return info, errors.New("learner.feature_types: found a categorical feature; accepted: numeric ones")
	}
	info.BaseScore, err = baseScore(d.baseScore, d.objective)
	return info, err
}

// outputs checks that the model has one.
func (d *document) outputs() error {
	if _, err := count("num_class", or(d.classes, "0"), 0, 0); err != nil {
		return fmt.Errorf("several classes: %w", err)
	}
	if _, err := count("num_target", or(d.targets, "1"), 1, 1); err != nil {
		return fmt.Errorf("several targets: %w", err)
	}
	return nil
}

// gbtree is the booster that holds the trees.
func (d *document) gbtree() *booster {
	if d.inner != nil {
		return d.inner
	}
	return &d.booster
}

// trees returns the trees and dart's weights, nil for none.
func (d *document) trees() ([]tree, []float32, error) {
	b := d.gbtree()
	const at = "learner.gradient_booster"
	if d.inner != nil && (d.booster.hasModel || d.booster.name != "dart" || d.inner.name != "gbtree") {
		return nil, nil, fmt.Errorf("%s: %s around %s; accepted: dart around one gbtree", at, d.booster.name, shown(d.inner.name))
	}
	if !b.hasModel {
		return nil, nil, fmt.Errorf("%s: no member model", at)
	}
	if _, err := count("size_leaf_vector", or(b.size, "0"), 0, 1); err != nil {
		return nil, nil, fmt.Errorf("vector leaves: %w", err)
	}
	if _, err := count("num_trees", or(b.count, strconv.Itoa(len(b.trees))), len(b.trees), len(b.trees)); err != nil {
		return nil, nil, err
	}
	if len(b.trees) == 0 {
		return nil, nil, errors.New("no tree")
	}
	if len(b.info) != len(b.trees) || slices.ContainsFunc(b.info, func(g int32) bool { return g != 0 }) {
		return nil, nil, fmt.Errorf("%s.model.tree_info: not %d times 0, one output's", at, len(b.trees))
	}
	weights, err := d.weights(len(b.trees))
	return b.trees, weights, err
}

// weights returns dart's tree weights, which stand beside the nested booster (up
// to 3.2) or inside the model (since 3.3).
func (d *document) weights(trees int) ([]float32, error) {
	const at = "learner.gradient_booster weight_drop"
	weights := d.gbtree().weightsInModel
	dart := d.booster.name == "dart"
	switch {
	case len(weights) > 0 && len(d.booster.weights) > 0, len(d.booster.weights) > 0 && !dart:
		return nil, fmt.Errorf("%s: found in a place where %s has none", at, d.booster.name)
	case dart && len(weights) == 0:
		weights = d.booster.weights
	}
	if len(weights) == 0 && !dart {
		return nil, nil
	}
	if len(weights) != trees {
		return nil, fmt.Errorf("%s: %d weights for %d trees", at, len(weights), trees)
	}
	for i, w := range weights {
		if !finite(w) {
			return nil, fmt.Errorf("%s[%d]: found %v; accepted: a finite number", at, i, w)
		}
	}
	return weights, nil
}

// rounds returns, for 0, 1, 2, … boosting rounds, how many trees they have.
func (b *booster) rounds() ([]int, error) {
	if b.indptr == nil {
		parallel, err := count("num_parallel_tree", or(b.parallel, "1"), 1, MaxTrees)
		if err != nil {
			return nil, err
		}
		if len(b.trees)%parallel != 0 {
			return nil, fmt.Errorf("num_parallel_tree %d does not divide %d trees", parallel, len(b.trees))
		}
		var rounds []int
		for n := 0; n <= len(b.trees); n += parallel {
			rounds = append(rounds, n)
		}
		return rounds, nil
	}
	rounds := make([]int, len(b.indptr))
	for i, n := range b.indptr {
		rounds[i] = int(n)
	}
	if n := len(rounds); n < 2 || n > MaxTrees+1 || rounds[0] != 0 || rounds[n-1] != len(b.trees) || !slices.IsSorted(rounds) {
		return nil, fmt.Errorf("iteration_indptr: not a rising sequence from 0 to %d", len(b.trees))
	}
	return rounds, nil
}

// iterations is how many rounds to keep.
func (d *document) iterations(o LoadOptions, all int) (int, error) {
	switch {
	case o.Iterations == 0:
		return all, nil
	case o.Iterations == BestIteration:
		best, ok := d.attributes["best_iteration"]
		if !ok {
			return 0, errors.New("no attribute best_iteration: the model was trained without early stopping")
		}
		n, err := count("best_iteration", best, 0, all-1)
		return n + 1, err
	case o.Iterations < 0 || o.Iterations > all:
		return 0, fmt.Errorf("%d iterations asked for; accepted: 0 to %d", o.Iterations, all)
	}
	return o.Iterations, nil
}

// Objectives.
const (
	logistic = "binary:logistic"
	logitRaw = "binary:logitraw"
)

// baseScore reads a base score: a number, or since 3.1 a list of one.
func baseScore(text, objective string) (float32, error) {
	bare := strings.TrimSpace(text)
	if n := len(bare); n >= 2 && (bare[0] == '[' && bare[n-1] == ']' || bare[0] == '(' && bare[n-1] == ')') {
		bare = strings.TrimSpace(strings.TrimSuffix(bare[1:n-1], ","))
	}
	v, err := strconv.ParseFloat(bare, 32)
	p := float32(v)
	if err != nil || !finite(p) {
		return 0, fmt.Errorf("learner.learner_model_param.base_score: found %s; accepted: one finite number, alone or in brackets", shown(text))
	}
	if objective == logistic && (p < 0 || p > 1) {
		return 0, fmt.Errorf("learner.learner_model_param.base_score: found %v; accepted: a probability", p)
	}
	return p, nil
}

// intercept is the margin of the base score. binary:logitraw takes it as it is.
// binary:logistic takes the log odds in single precision; since 3.2 of a
// probability held inside 10⁻⁶ … 1 − 10⁻⁶ (observed: 3.1.3 still gives −16.1 for
// 10⁻⁷, 3.2.0 gives −13.8).
func intercept(info Info) float32 {
	p := info.BaseScore
	if info.Objective == logitRaw {
		return p
	}
	const eps = float32(1e-6)
	if v := info.Version; v[0] > 3 || v[0] == 3 && v[1] >= 2 {
		p = min(max(p, eps), 1-eps)
	}
	odds := float32(1/p) - 1
	return -float32(math.Log(float64(odds)))
}

// count reads a decimal number that the file holds as a string.
func count(name, text string, low, high int) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < low || n > high {
		accepted := strconv.Itoa(low)
		if high > low {
			accepted += " to " + strconv.Itoa(high)
		}
		return 0, fmt.Errorf("%s: found %s; accepted: %s", name, shown(text), accepted)
	}
	return n, nil
}

func or(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}

func finite(v float32) bool { return v-v == 0 }
