package fleet

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

func loadSchema(t *testing.T) map[string]any {
	t.Helper()
	data, err := Schema()
	if err != nil {
		t.Fatal(err)
	}
	var s map[string]any
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// schemaKeys lists every key of the file as "pools.endpoints.address".
func schemaKeys(t *testing.T) []string {
	var out []string
	var walk func(s map[string]any, path string)
	walk = func(s map[string]any, path string) {
		if items, ok := s["items"].(map[string]any); ok {
			walk(items, path)
		}
		for _, one := range asList(s["oneOf"]) {
			walk(one.(map[string]any), path)
		}
		properties, _ := s["properties"].(map[string]any)
		for name, p := range properties {
			// Of the four addresses of serve, one uses the long form.
			if !strings.HasPrefix(path, "serve.") || path == "serve.accessLog" {
				out = append(out, join(path, name))
			}
			walk(p.(map[string]any), join(path, name))
		}
	}
	walk(loadSchema(t), "")
	slices.Sort(out)
	return out
}

func withoutIndexes(path string) string {
	return compiled(`\[\d+\]`).ReplaceAllString(path, "")
}

var patterns = map[string]*regexp.Regexp{}

// compiled keeps patterns: the tests of this file match some ten thousand times.
func compiled(pattern string) *regexp.Regexp {
	if patterns[pattern] == nil {
		patterns[pattern] = regexp.MustCompile(pattern)
	}
	return patterns[pattern]
}

func asList(v any) []any { l, _ := v.([]any); return l }

// violations is a small JSON Schema validator: the keywords that our schema
// uses, and a fault for any other. It shares no code with the decoder.
func violations(s map[string]any, v any, path string) (out []string) {
	bad := func(format string, args ...any) { out = append(out, path+": "+fmt.Sprintf(format, args...)) }
	text, isText := v.(string)
	items, isList := v.([]any)
	object, isObject := v.(map[string]any)
	number, isNumber := asNumber(v)
	for _, keyword := range slices.Sorted(maps.Keys(s)) {
		arg := s[keyword]
		switch keyword {
		case "$schema", "title", "description", "default":
		case "type":
			ok := map[string]bool{"string": isText, "array": isList, "object": isObject, "number": isNumber,
				"integer": isNumber && number == float64(int64(number)), "boolean": v == true || v == false}[arg.(string)]
			if !ok {
				bad("%v is no %s", v, arg)
			}
		case "const":
			if v != arg {
				bad("%v is not %v", v, arg)
			}
		case "enum":
			if !slices.Contains(asList(arg), v) {
				bad("%v is none of %v", v, arg)
			}
		case "pattern":
			if isText && !compiled(arg.(string)).MatchString(text) {
				bad("%q does not match %s", text, arg)
			}
		case "not":
			if len(violations(arg.(map[string]any), v, path)) == 0 {
				bad("%v matches what it must not", v)
			}
		case "oneOf":
			valid := 0
			for _, one := range asList(arg) {
				if len(violations(one.(map[string]any), v, path)) == 0 {
					valid++
				}
			}
			if valid != 1 {
				bad("%v fits %d alternatives", v, valid)
			}
		case "minLength", "maxLength":
			n := float64(utf8.RuneCountInString(text))
			if isText && (keyword == "minLength" && n < arg.(float64) || keyword == "maxLength" && n > arg.(float64)) {
				bad("%q has %v characters", text, n)
			}
		case "minimum":
			if isNumber && number < arg.(float64) {
				bad("%v is too small", v)
			}
		case "maximum":
			if isNumber && number > arg.(float64) {
				bad("%v is too large", v)
			}
		case "minItems", "maxItems":
			n := float64(len(items))
			if isList && (keyword == "minItems" && n < arg.(float64) || keyword == "maxItems" && n > arg.(float64)) {
				bad("%v items", n)
			}
		case "items":
			for i, item := range items {
				out = append(out, violations(arg.(map[string]any), item, index(path, i))...)
			}
		case "required":
			for _, name := range asList(arg) {
				if _, ok := object[name.(string)]; isObject && !ok {
					bad("no %v", name)
				}
			}
		case "properties":
			for name, property := range arg.(map[string]any) {
				if content, ok := object[name]; ok {
					out = append(out, violations(property.(map[string]any), content, join(path, name))...)
				}
			}
		case "additionalProperties":
			properties, _ := s["properties"].(map[string]any)
			for name := range object {
				if _, ok := properties[name]; !ok {
					bad("unknown %s", name)
				}
			}
		default:
			bad("the schema uses %s, which this test does not know", keyword)
		}
	}
	return out
}

func asNumber(v any) (float64, bool) {
	switch n := v.(type) {
	case int:
		return float64(n), true
	case float64:
		return n, true
	}
	return 0, false
}

func violationsOf(t *testing.T, data []byte) []string {
	t.Helper()
	var v any
	if err := yaml.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	return violations(loadSchema(t), v, "")
}

func TestSchemaAcceptsGoodFiles(t *testing.T) {
	for _, path := range goodFiles(t) {
		for _, v := range violationsOf(t, mustRead(t, path)) {
			t.Errorf("%s: %s", path, v)
		}
	}
}

// TestSchemaAndDecoderKnowTheSameKeys removes and changes each key of full.yaml in
// turn: schema and decoder must refuse the same.
func TestSchemaAndDecoderKnowTheSameKeys(t *testing.T) {
	var whole any
	if err := yaml.Unmarshal(mustRead(t, "testdata/full.yaml"), &whole); err != nil {
		t.Fatal(err)
	}
	s := loadSchema(t)
	eachMapping(whole, func(m map[string]any) {
		for _, key := range slices.Sorted(maps.Keys(m)) {
			kept := m[key]
			delete(m, key)
			compare(t, s, whole, "without "+key)
			m[key+"x"] = kept
			compare(t, s, whole, key+" renamed")
			delete(m, key+"x")
			m[key] = nil
			compare(t, s, whole, key+" empty")
			m[key] = map[string]any{"a": []any{1}}
			compare(t, s, whole, key+" a mapping")
			m[key] = kept
		}
	})
}

// compare lets schema and decoder judge one file. Faults of what fits together
// are the decoder's alone.
func compare(t *testing.T, s map[string]any, v any, what string) {
	t.Helper()
	data, err := yaml.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	d := &decoder{lines: map[string]int{}}
	object(configFields(new(Config))).read(d, d.document(data), "")
	if bySchema := violations(s, v, ""); (len(bySchema) == 0) != (len(d.faults) == 0) {
		t.Errorf("%s: schema says %q, decoder says %q", what, bySchema, d.faults)
	}
}

func eachMapping(v any, visit func(map[string]any)) {
	switch v := v.(type) {
	case map[string]any:
		visit(v)
		for _, key := range slices.Sorted(maps.Keys(v)) {
			eachMapping(v[key], visit)
		}
	case []any:
		for _, item := range v {
			eachMapping(item, visit)
		}
	}
}

// TestEveryDefaultIsValid holds each default against its own schema.
func TestEveryDefaultIsValid(t *testing.T) {
	var walk func(s map[string]any, path string)
	walk = func(s map[string]any, path string) {
		if preset, ok := s["default"]; ok {
			for _, v := range violations(s, preset, path) {
				t.Errorf("default: %s", v)
			}
		}
		for _, under := range []string{"properties"} {
			children, _ := s[under].(map[string]any)
			for name, child := range children {
				walk(child.(map[string]any), join(path, name))
			}
		}
		if items, ok := s["items"].(map[string]any); ok {
			walk(items, path+"[]")
		}
	}
	walk(loadSchema(t), "")
}
