package fleet

import (
	"encoding/json"
	"maps"
	"strings"

	"go.yaml.in/yaml/v3"
)

// schema is a piece of a JSON Schema.
type schema map[string]any

// Schema returns the JSON Schema (draft 2020-12) of the config file, made from
// the tables that also read it. It is a little more lenient than [Parse], which
// in addition checks ranges of durations and sizes and how parts of the file
// fit together.
func Schema() ([]byte, error) {
	s := object(configFields(new(Config))).schema()
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = "Fairlead configuration, " + APIVersion
	return json.MarshalIndent(s, "", "  ")
}

func objectSchema(fields []field) schema {
	properties, required := schema{}, []string{}
	for _, f := range fields {
		if f.later != "" {
			continue
		}
		s := maps.Clone(f.value.schema())
		if text := f.describe(s); text != "" {
			s["description"] = text
		}
		if f.preset != "" {
			s["default"] = presetValue(f.preset)
		}
		properties[f.name] = s
		if f.required {
			required = append(required, f.name)
		}
	}
	s := schema{"type": "object", "additionalProperties": false, "properties": properties}
	if len(required) > 0 {
		s["required"] = required
	}
	return s
}

// describe says what a field means and, where the schema alone doesn't show it
// to a person, what is accepted.
func (f field) describe(s schema) string {
	if s["type"] != "string" && s["type"] != "integer" && s["type"] != "number" {
		return f.doc
	}
	return strings.TrimSpace(f.doc + " Accepted: " + f.value.accepted + ".")
}

// presetValue is a default as JSON has it.
func presetValue(text string) any {
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		return text // a test reads every default
	}
	return v
}
