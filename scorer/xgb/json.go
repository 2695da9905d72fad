package xgb

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// jsonReader reads JSON. It steps token by token through what is wanted and
// takes the rest as raw text.
type jsonReader struct {
	data []byte
	dec  *json.Decoder
}

func newJSONReader(data []byte) *jsonReader {
	return &jsonReader{data: data, dec: json.NewDecoder(bytes.NewReader(data))}
}

func (r *jsonReader) object(visit func(key string) error) error {
	if err := r.open('{', "an object"); err != nil {
		return err
	}
	for r.dec.More() {
		key, err := r.text()
		if err != nil {
			return err
		}
		if err := visit(key); err != nil {
			return err
		}
	}
	return r.close()
}

func (r *jsonReader) array(visit func(i int) error) error {
	if err := r.open('[', "an array"); err != nil {
		return err
	}
	for i := 0; r.dec.More(); i++ {
		if err := visit(i); err != nil {
			return err
		}
	}
	return r.close()
}

func (r *jsonReader) open(want json.Delim, what string) error {
	token, err := r.dec.Token()
	if err != nil {
		return r.explain(err)
	}
	if token != want {
		return fmt.Errorf("found %s; accepted: %s", tokenKind(token), what)
	}
	return nil
}

func (r *jsonReader) close() error {
	_, err := r.dec.Token()
	return r.explain(err)
}

func tokenKind(token json.Token) string {
	switch token.(type) {
	case json.Delim:
		return "an object or array"
	case string:
		return "a string"
	case bool:
		return "a boolean"
	case nil:
		return "null"
	}
	return "a number"
}

func (r *jsonReader) text() (string, error) {
	token, err := r.dec.Token()
	if err != nil {
		return "", r.explain(err)
	}
	s, ok := token.(string)
	if !ok {
		return "", fmt.Errorf("found %s; accepted: a string", tokenKind(token))
	}
	return s, nil
}

func (r *jsonReader) floats() ([]float32, error) {
	var out []float32
	err := r.numbers(&out)
	return out, err
}

func (r *jsonReader) ints() ([]int32, error) {
	var out []flag
	err := r.numbers(&out)
	ints := make([]int32, len(out))
	for i, v := range out {
		ints[i] = int32(v)
	}
	return ints, err
}

// flag is an integer that may be written as a boolean.
type flag int32

func (f *flag) UnmarshalJSON(text []byte) error {
	switch string(text) {
	case "true":
		*f = 1
		return nil
	case "false":
		*f = 0
		return nil
	}
	return json.Unmarshal(text, (*int32)(f))
}

// numbers reads an array of numbers into a slice. Unmarshal rounds to the
// slice's type and refuses what does not fit it, but takes null for "leave as it
// is": so null is looked for before. A string cannot hide one, since it is no
// number either.
func (r *jsonReader) numbers(to any) error {
	var raw json.RawMessage
	if err := r.dec.Decode(&raw); err != nil {
		return r.explain(err)
	}
	if bytes.Contains(raw, []byte("null")) {
		return errors.New("found null; accepted: an array of numbers")
	}
	if err := json.Unmarshal(raw, to); err != nil {
		return fmt.Errorf("accepted: an array of numbers: %w", err)
	}
	return nil
}

func (r *jsonReader) skip() error {
	var raw json.RawMessage
	return r.explain(r.dec.Decode(&raw))
}

func (r *jsonReader) end() error {
	if _, err := r.dec.Token(); err != io.EOF {
		return fmt.Errorf("more text after the document, near byte %d", r.dec.InputOffset())
	}
	return nil
}

// explain adds to a syntax error what XGBoost writes that is no JSON.
func (r *jsonReader) explain(err error) error {
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		rest := r.data[min(max(0, int(syntax.Offset)-1), len(r.data)):]
		for _, word := range []string{"NaN", "Infinity", "-Infinity", "inf", "-inf", "nan"} {
			if bytes.HasPrefix(rest, []byte(word)) {
				return fmt.Errorf("%s near byte %d: a number that is not finite, such as XGBoost writes for categorical splits; accepted: finite numbers", word, syntax.Offset)
			}
		}
	}
	return err
}
