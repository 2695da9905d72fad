package xgb

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
)

type (
	obj = map[string]any
	arr = []any
)

// tinyModel is the smallest document of interest: one split on feature 0 at 0.5.
func tinyModel() obj {
	return obj{
		"version": arr{3, 2, 0},
		"learner": obj{
			"attributes":          obj{},
			"feature_names":       arr{},
			"feature_types":       arr{},
			"learner_model_param": obj{"base_score": "[5E-1]", "num_class": "0", "num_feature": "2", "num_target": "1"},
			"objective":           obj{"name": "binary:logistic"},
			"gradient_booster": obj{
				"name": "gbtree",
				"model": obj{
					"gbtree_model_param": obj{"num_trees": "1", "num_parallel_tree": "1"},
					"tree_info":          arr{0},
					"iteration_indptr":   arr{0, 1},
					"trees": arr{obj{
						"left_children":    arr{1, -1, -1},
						"right_children":   arr{2, -1, -1},
						"split_indices":    arr{0, 0, 0},
						"split_conditions": arr{0.5, -3.0, 2.0},
						"default_left":     arr{0, 0, 0},
						"split_type":       arr{0, 0, 0},
						"categories_nodes": arr{},
						"tree_param":       obj{"num_nodes": "3", "num_deleted": "0", "size_leaf_vector": "1"},
					}},
				},
			},
		},
	}
}

// set changes the member at path, whose words are keys; a number walks into an
// array.
func set(doc obj, path string, value any) {
	words := strings.Split(path, ".")
	at := any(doc)
	for _, w := range words[:len(words)-1] {
		if list, ok := at.(arr); ok {
			at = list[w[0]-'0']
		} else {
			at = at.(obj)[w]
		}
	}
	last := words[len(words)-1]
	if value == nil {
		delete(at.(obj), last)
		return
	}
	at.(obj)[last] = value
}

// ubjson writes a document as UBJSON in the plainest form.
func ubjson(v any) []byte {
	text := func(s string) []byte {
		return append(binary.BigEndian.AppendUint64([]byte{'L'}, uint64(len(s))), s...)
	}
	var out []byte
	switch v := v.(type) {
	case obj:
		out = append(out, '{')
		for _, k := range slices.Sorted(maps.Keys(v)) {
			out = append(append(out, text(k)...), ubjson(v[k])...)
		}
		return append(out, '}')
	case arr:
		out = append(out, '[')
		for _, e := range v {
			out = append(out, ubjson(e)...)
		}
		return append(out, ']')
	case string:
		return append([]byte{'S'}, text(v)...)
	case bool:
		if v {
			return []byte{'T'}
		}
		return []byte{'F'}
	case int:
		return binary.BigEndian.AppendUint64([]byte{'L'}, uint64(v))
	case float64:
		return binary.BigEndian.AppendUint64([]byte{'D'}, math.Float64bits(v))
	case nil:
		return []byte{'Z'}
	}
	panic("type")
}

const (
	param    = "learner.learner_model_param."
	booster0 = "learner.gradient_booster."
	tree0    = booster0 + "model.trees.0."
)

func TestLoadRefusesWhatItCannotEvaluate(t *testing.T) {
	for _, c := range []struct {
		name, path string
		value      any
		want       string
	}{
		{"no learner", "learner", nil, "no member learner"},
		{"no version", "version", nil, "version []; accepted: XGBoost 1.x to 3.x"},
		{"future version", "version", arr{4, 0, 0}, "version [4 0 0]; accepted: XGBoost 1.x to 3.x"},
		{"booster", booster0 + "name", "gblinear", "found gblinear; accepted: gbtree, dart"},
		{"objective", "learner.objective.name", "rank:ndcg", "found rank:ndcg; accepted: binary:logistic, binary:logitraw"},
		{"long objective", "learner.objective.name", strings.Repeat("x", 1000), `found "` + strings.Repeat("x", 40) + `"; accepted`},
		{"classes", param + "num_class", "3", "several classes: num_class: found 3; accepted: 0"},
		{"targets", param + "num_target", "2", "several targets: num_target: found 2; accepted: 1"},
		{"no features", param + "num_feature", "0", "num_feature: found 0; accepted: 1 to 32"},
		{"many features", param + "num_feature", "33", "num_feature: found 33; accepted: 1 to 32"},
		{"huge number", param + "num_feature", "99999999999999999999", "num_feature: found 99999999999999999999"},
		{"names", "learner.feature_names", arr{"a"}, "feature_names: 1 names for 2 features"},
		{"category", "learner.feature_types", arr{"float", "c"}, "found a categorical feature; accepted: numeric ones"},
		{"base score text", param + "base_score", "half", "base_score: found half; accepted: one finite number"},
		{"base scores", param + "base_score", "[1E-1,2E-1]", "base_score: found [1E-1,2E-1]; accepted: one"},
		{"base score NaN", param + "base_score", "NaN", "base_score: found NaN; accepted: one finite number"},
		{"base score range", param + "base_score", "1.5", "base_score: found 1.5; accepted: a probability"},
		{"base score overflow", param + "base_score", "1e99", "base_score: found 1e99; accepted: one finite number"},
		{"no model", booster0 + "model", nil, "no member model"},
		{"trees count", booster0 + "model.gbtree_model_param.num_trees", "2", "num_trees: found 2; accepted: 1"},
		{"vector leaves", booster0 + "model.gbtree_model_param.size_leaf_vector", "2", "vector leaves"},
		{"no tree", booster0 + "model.trees", arr{}, "num_trees: found 1; accepted: 0"},
		{"groups", booster0 + "model.tree_info", arr{1}, "tree_info: not 1 times 0"},
		{"groups missing", booster0 + "model.tree_info", nil, "tree_info: not 1 times 0"},
		{"rounds", booster0 + "model.iteration_indptr", arr{0, 2}, "iteration_indptr: not a rising sequence from 0 to 1"},
		{"rounds falling", booster0 + "model.iteration_indptr", arr{0, 1, 0, 1}, "iteration_indptr: not a rising sequence"},
		{"dart's weights beside gbtree", booster0 + "weight_drop", arr{1.0}, "found in a place where gbtree has none"},
		{"weights", booster0 + "model.weight_drop", arr{1.0, 2.0}, "2 weights for 1 trees"},
		{"nested booster", booster0 + "gbtree", obj{"name": "gbtree"}, "accepted: dart around one gbtree"},
		{"lengths", tree0 + "right_children", arr{2, -1}, "trees[0]: right_children: 2 entries for 3 nodes"},
		{"no conditions", tree0 + "split_conditions", nil, "trees[0]: split_conditions: 0 entries for 3 nodes"},
		{"no nodes", tree0 + "left_children", arr{}, "left_children: no node"},
		{"cycle", tree0 + "left_children", arr{0, -1, -1}, "node 0 has two parents"},
		{"shared child", tree0 + "right_children", arr{1, -1, -1}, "node 1 has two parents"},
		{"child bound", tree0 + "right_children", arr{3, -1, -1}, "child 3 of 3 nodes"},
		{"negative child", tree0 + "right_children", arr{-2, -1, -1}, "child -2 of 3 nodes"},
		{"half a leaf", tree0 + "right_children", arr{-1, -1, -1}, "child -1 of 3 nodes"},
		{"unreachable", tree0 + "left_children", arr{-1, -1, -1}, "child -1 of 3 nodes"},
		{"feature bound", tree0 + "split_indices", arr{2, 0, 0}, "split_indices[0]: found 2; accepted: 0 to 1"},
		{"negative feature", tree0 + "split_indices", arr{-1, 0, 0}, "split_indices[0]: found -1"},
		{"int overflow", tree0 + "split_indices", arr{1 << 40, 0, 0}, "split_indices: "},
		{"float for int", tree0 + "split_indices", arr{0.5, 0, 0}, "split_indices: "},
		{"float overflow", tree0 + "split_conditions", arr{1e300, 0.0, 0.0}, "split_conditions"},
		{"leaf sum", tree0 + "split_conditions", arr{0.5, 3e38, 0.0}, "leaves add up to"},
		{"default", tree0 + "default_left", arr{2, 0, 0}, "default_left[0]: found 2; accepted: 0, 1"},
		{"split type", tree0 + "split_type", arr{1, 0, 0}, "split_type[0]: found 1, a categorical split"},
		{"categories", tree0 + "categories_nodes", arr{0}, "categorical splits; accepted: numeric splits"},
		{"leaf vector", tree0 + "leaf_weights", arr{1.0, 2.0}, "vector leaves; accepted: one value per leaf"},
		{"node count", tree0 + "tree_param.num_nodes", "4", "num_nodes: found 4; accepted: 3"},
		{"deleted", tree0 + "tree_param.num_deleted", "1", "3 of 3 nodes can be reached from the root, 1 are marked deleted"},
		{"deleted all", tree0 + "tree_param.num_deleted", "3", "num_deleted: found 3; accepted: 0 to 2"},
		{"null for numbers", tree0 + "left_children", arr{1, nil, -1}, "left_children"},
		{"null for text", "learner.objective.name", arr{}, "learner.objective.name: found"},
		{"text for numbers", tree0 + "left_children", "AQID", "left_children"},
		{"object for list", booster0 + "model.trees", obj{}, "accepted: an array"},
		{"list for object", tree0 + "tree_param", arr{}, "trees[0].tree_param: found"},
		{"number for name", "learner.feature_names", arr{1, 2}, "learner.feature_names[0]: found"},
		{"attribute", "learner.attributes", obj{"a": 1}, "learner.attributes.a: found"},
	} {
		doc := tinyModel()
		set(doc, c.path, c.value)
		data, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		for form, data := range map[string][]byte{"json": data, "ubjson": ubjson(doc)} {
			m, err := Load(data, LoadOptions{})
			if m != nil || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s, %s: error %v; want %q", c.name, form, err, c.want)
			}
		}
	}
}

func TestLoadAcceptsOlderSpellings(t *testing.T) {
	for _, c := range []struct {
		name, path string
		value      any
	}{
		{"booleans", tree0 + "default_left", arr{false, true, true}},
		{"plain base score", param + "base_score", "5E-1"},
		{"base score in a tuple", param + "base_score", "(5E-1,)"},
		{"no rounds", booster0 + "model.iteration_indptr", nil},
		{"no split types", tree0 + "split_type", nil},
		{"no target count", param + "num_target", nil},
		{"version", "version", arr{1, 0, 0}},
		{"unknown member", "learner.novelty", obj{"a": arr{1, "x", obj{}, true, 1.5, arr{}}}},
	} {
		doc := tinyModel()
		set(doc, c.path, c.value)
		data, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		for form, data := range map[string][]byte{"json": data, "ubjson": ubjson(doc)} {
			m, err := Load(data, LoadOptions{})
			if err != nil {
				t.Errorf("%s, %s: %v", c.name, form, err)
			} else if a, b, missing := m.Margin([]float32{0.4}), m.Margin([]float32{0.5}), m.Margin(nil); a != -3 || b != 2 || missing != 2 {
				t.Errorf("%s, %s: margins %v %v %v; want -3 2 2", c.name, form, a, b, missing)
			}
		}
	}
}

func TestLoadRefusesRealModelsOfOtherKinds(t *testing.T) {
	for name, want := range map[string]string{
		"multiclass":  "objective.name: found multi:softprob",
		"regression":  "objective.name: found reg:squarederror",
		"linear":      "found gblinear; accepted: gbtree, dart",
		"deep":        "depth above 8; accepted: up to 8",
		"targets":     "several targets",
		"vector_leaf": "several targets",
		"categorical": "categorical",
	} {
		for _, form := range []string{"json", "ubj"} {
			_, err := Load(unzip(t, "refused", name+"."+form+".gz"), LoadOptions{})
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s.%s: %v; want %q", name, form, err, want)
			}
		}
	}
}

func TestLoadRefusesBrokenFiles(t *testing.T) {
	good, err := json.Marshal(tinyModel())
	if err != nil {
		t.Fatal(err)
	}
	text := string(good)
	for name, c := range map[string]struct{ data, want string }{
		"empty":             {"", "begins with \"\"; accepted: JSON or UBJSON"},
		"old binary":        {"binf\x00\x00", "the old binary format, which XGBoost 3.1 removed"},
		"pickle":            {"\x80\x04\x95abc", "accepted: JSON or UBJSON"},
		"too large":         {"{" + strings.Repeat(" ", MaxSize), "33554433 bytes; accepted: up to 33554432"},
		"cut":               {text[:len(text)/2], "unexpected EOF"},
		"only a brace":      {"{ ", "unexpected EOF"},
		"trailing":          {text + "{}", "more text after the document"},
		"duplicate":         {strings.Replace(text, `"num_class":"0"`, `"num_class":"0","num_class":"0"`, 1), "learner.learner_model_param.num_class: duplicate key"},
		"duplicate unknown": {strings.Replace(text, `"num_class":"0"`, `"x":1,"x":2`, 1), "x: duplicate key"},
		"NaN":               {strings.Replace(text, `[0.5,-3,2]`, `[NaN,-3,2]`, 1), "split_conditions: found NaN after byte"},
		"Infinity":          {strings.Replace(text, `[0.5,-3,2]`, `[Infinity,-3,2]`, 1), "split_conditions: found Infinity after byte"},
		"nesting":           {strings.Replace(text, `"num_class":"0"`, `"x":`+strings.Repeat("[", 100_000), 1), "exceeded max depth"},
		"members":           {`{` + strings.Repeat(`"a":1,`, 2), "a: duplicate key"},
		"many trees":        {strings.Replace(text, `"trees":[`, `"trees":[`+strings.Repeat(`{},`, MaxTrees), 1), "more than 2048 trees"},
		"many names":        {strings.Replace(text, `"feature_names":[]`, `"feature_names":[`+strings.Repeat(`"a",`, 40)+`"b"]`, 1), "more than 32 features"},
	} {
		if _, err := Load([]byte(c.data), LoadOptions{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
}

// key is a UBJSON key.
func key(s string) string { return "U" + string(rune(len(s))) + s }

func TestLoadRefusesBrokenUBJSON(t *testing.T) {
	length := func(n int64) string { return "L" + string(binary.BigEndian.AppendUint64(nil, uint64(n))) }
	trees := "{" + key("learner") + "{" + key("gradient_booster") + "{" + key("model") + "{" + key("trees")
	conditions := trees + "[{" + key("split_conditions")
	for name, c := range map[string]struct{ data, want string }{
		"huge typed array":    {conditions + "[$d#" + length(1<<40), "split_conditions: length 1099511627776 with 0 bytes left"},
		"array over the end":  {conditions + "[$d#U\x20" + strings.Repeat("\x00", 60), "array of 32 elements of 4 bytes with 60 bytes left"},
		"negative count":      {conditions + "[$d#" + length(-1), "length -1"},
		"zero-byte elements":  {conditions + "[$Z#" + length(5), "array of type 'Z'; accepted: a numeric type"},
		"array of arrays":     {trees + "[$[#U\x05", "array of type '['"},
		"typed, no count":     {conditions + "[$d\x00", "typed array without a count"},
		"counted objects":     {trees + "[#" + length(1<<30), "length 1073741824"},
		"counted, cut":        {trees + "[#U\x02{}", "unexpected EOF"},
		"numbers for objects": {trees + "[$U#U\x02ab", "array of numbers of type 'U'; accepted: an array of strings or objects"},
		"long key":            {"{" + length(1<<62) + "learner", "key: length 4611686018427387904"},
		"float length":        {"{" + key("learner") + "{" + key("gradient_booster") + "Sd\x00\x00\x00\x00", "gradient_booster: found type 'S'"},
		"length of a float":   {"{" + key("x") + "Sd\x00\x00\x00\x00", "length of type 'd'; accepted: an integer"},
		"unknown type":        {"{" + key("x") + "?", "unknown type '?'"},
		"optimised object":    {"{" + key("learner") + "{$U", "key: length of type '$'"},
		"nesting":             {"{" + key("x") + strings.Repeat("[", 100_000), "nested more than 64 deep"},
		"nested objects":      {"{" + key("x") + strings.Repeat("{U\x01a", 100_000), "nested more than 64 deep"},
		"duplicate":           {"{" + key("version") + "[$U#U\x03\x03\x02\x00" + key("version") + "[]", "version: duplicate key"},
		"unprintable key":     {"{" + key("a\x00\n") + "?", `"a\x00\n": unknown type`},
		"cut":                 {"{" + key("version"), "unexpected EOF"},
		"trailing":            {string(ubjson(tinyModel())) + "x", "1 more bytes after the document"},
		"booleans for floats": {conditions + "[T]", "split_conditions: [0]: found type 'T'"},
		"text among numbers":  {conditions + "[SU\x01a]", "split_conditions: [0]: found type 'S'; accepted: a number"},
		"NaN":                 {"", ""},
	} {
		if name == "NaN" {
			doc := tinyModel()
			set(doc, tree0+"split_conditions", arr{math.NaN(), 0.0, 0.0})
			c.data, c.want = string(ubjson(doc)), "split_conditions[0]: found NaN; accepted: a finite number"
		}
		if _, err := Load([]byte(c.data), LoadOptions{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
}

// TestLoadReadsAllUBJSONTypes skips one member of each type and reads numbers of
// each width.
func TestLoadReadsAllUBJSONTypes(t *testing.T) {
	good := ubjson(tinyModel())
	extra := key("x") + "[Z" + "T" + "F" + "Ca" + "i\xff" + "U\xff" + "I\x80\x00" + "l\x00\x00\x00\x01" +
		"L\x00\x00\x00\x00\x00\x00\x00\x01" + "d\x00\x00\x00\x00" + "D\x00\x00\x00\x00\x00\x00\x00\x00" +
		"SU\x01a" + "{U\x01aZ}" + "[$I#U\x02\x00\x01\x00\x02" + "[#U\x01Z" + "]"
	data := append([]byte("{"+extra), good[1:]...)
	if _, err := Load(data, LoadOptions{}); err != nil {
		t.Error(err)
	}
	r := &ubjReader{data: []byte("[i\xfeU\xfeI\xff\xfel\xff\xff\xff\xfeL\xff\xff\xff\xff\xff\xff\xff\xfeTF]")}
	if got, err := r.ints(); err != nil || !slices.Equal(got, []int32{-2, 254, -2, -2, -2, 1, 0}) {
		t.Errorf("integers %v, %v", got, err)
	}
}

// TestLoadMemoryIsBoundedByTheInput measures what is allocated for files that
// announce much, or that are made to grow.
func TestLoadMemoryIsBoundedByTheInput(t *testing.T) {
	repeat := func(s string) string { return strings.Repeat(s, 200_000) }
	model := `{"learner":{"gradient_booster":{"model":{"trees":[`
	shallow := bytes.Buffer{}
	doc := tinyModel()
	tree := doc["learner"].(obj)["gradient_booster"].(obj)["model"].(obj)["trees"].(arr)[0]
	if err := json.NewEncoder(&shallow).Encode(tree); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string]string{
		"lists":   `{"a":[` + repeat("[],"),
		"numbers": model + `{"left_children":[` + repeat("1,") + "1]",
		"floats":  model + `{"split_conditions":[` + repeat("1,") + "1]",
		"trees":   model + repeat("{},"),
		"keys":    `{` + repeat(`"a":1,`),
		"deep":    `{"a":` + repeat("["),
		"bytes":   "{" + key("version") + "[" + repeat("T"),
		"strings": "{" + key("x") + "[" + repeat("SU\x00"),
		"stumps":  model + strings.Repeat(shallow.String()+",", MaxTrees-1) + shallow.String() + "]}}}}",
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Load([]byte(data), LoadOptions{})
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
		if got, most := after.TotalAlloc-before.TotalAlloc, uint64(40*len(data)+1<<20); got > most {
			t.Errorf("%s: %d bytes allocated for an input of %d", name, got, len(data))
		}
	}
}

func TestLoadRefusesIterationsThatAreNotThere(t *testing.T) {
	data, err := json.Marshal(tinyModel())
	if err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int]string{
		2:             "2 iterations asked for; accepted: 0 to 1",
		-2:            "-2 iterations asked for",
		BestIteration: "no attribute best_iteration",
	} {
		if _, err := Load(data, LoadOptions{Iterations: n}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%d: %v; want %q", n, err, want)
		}
	}
	doc := tinyModel()
	set(doc, "learner.attributes.best_iteration", "7")
	data, err = json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Load(data, LoadOptions{Iterations: BestIteration}); err == nil || !strings.Contains(err.Error(), "best_iteration: found 7; accepted: 0") {
		t.Error(err)
	}
}

// FuzzLoad wants -fuzzminimizetime 20x: shrinking each find of a few kilobytes
// otherwise takes all the time.
func FuzzLoad(f *testing.F) {
	for _, version := range versions {
		for _, name := range []string{"base_low", "leaf"} {
			for _, form := range []string{"json", "ubj"} {
				f.Add(unzip(f, version, name+"."+form+".gz"))
			}
		}
	}
	for _, name := range []string{"categorical", "linear", "multiclass", "vector_leaf"} {
		f.Add(unzip(f, "refused", name+".json.gz"))
		f.Add(unzip(f, "refused", name+".ubj.gz"))
	}
	tiny, err := json.Marshal(tinyModel())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(tiny)
	f.Add(ubjson(tinyModel()))
	rows := makeRows(9, 20)
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := Load(data, LoadOptions{})
		if err != nil {
			if m != nil || len(err.Error()) > 1000 {
				t.Errorf("model %v with error of %d bytes", m, len(err.Error()))
			}
			return
		}
		if info := m.Info(); info.Trees < 1 || info.Trees > MaxTrees || info.Depth > MaxDepth || info.NumFeatures > MaxFeatures {
			t.Errorf("accepted %+v", info)
		}
		for i := range rows {
			if v := m.Margin(rows[i][:]); !finite(v) {
				t.Errorf("margin %v", v)
			}
		}
		again, err := Load(data, LoadOptions{})
		if err != nil || again.Margin(rows[1][:]) != m.Margin(rows[1][:]) {
			t.Errorf("loaded again: %v", err)
		}
	})
}
