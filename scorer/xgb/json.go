package xgb

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
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

func (r *jsonReader) floats() (out []float32, err error) {
	err = r.numbers(func(text string) error {
		v, err := strconv.ParseFloat(text, 32)
		out = append(out, float32(v))
		return err
	})
	return out, err
}

func (r *jsonReader) ints() (out []int32, err error) {
	err = r.numbers(func(text string) error {
		switch text {
		case "true":
			text = "1"
		case "false":
			text = "0"
		}
		v, err := strconv.ParseInt(text, 10, 32)
		out = append(out, int32(v))
		return err
	})
	return out, err
}

// numbers reads an array without containers or strings in it. What the decoder
// has found to be one valid value, and is opened by a bracket, then falls into
// its elements at the commas; add refuses whatever is no number.
func (r *jsonReader) numbers(add func(text string) error) error {
	var raw json.RawMessage
	if err := r.dec.Decode(&raw); err != nil {
		return r.explain(err)
	}
	inner, ok := strings.CutPrefix(string(raw), "[")
	if !ok {
		return errors.New("found no array; accepted: an array of numbers")
	}
	inner = strings.TrimSpace(strings.TrimSuffix(inner, "]"))
	for i := 0; len(inner) > 0; i++ {
		element, rest, _ := strings.Cut(inner, ",")
		element = strings.TrimSpace(element)
		if err := add(element); err != nil {
			return fmt.Errorf("[%d]: found %s; accepted: a number that fits 32 bits", i, shown(element))
		}
		inner = rest
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
		return io.ErrUnexpectedEOF
	}
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) {
		return err
	}
	at := r.dec.InputOffset() // of the value that could not be read
	value, _, _ := bytes.Cut(r.data[at:], []byte("]"))
	for _, word := range []string{"NaN", "Infinity"} {
		if bytes.Contains(value, []byte(word)) {
			return fmt.Errorf("found %s after byte %d, which XGBoost writes for categorical splits; accepted: finite numbers", word, at)
		}
	}
	return fmt.Errorf("after byte %d: %w", at, err)
}
