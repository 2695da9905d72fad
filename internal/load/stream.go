package load

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// readers are reused: a load of long streams would else allocate one buffer per
// request.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 8<<10) }}

// readStream reads server-sent events to their end. Events are not decoded:
// looking for the field that holds text is enough, because inside a JSON string
// quotes are escaped and so a key can't be mistaken.
func readStream(body io.Reader, dialect fleet.Dialect, r *Result, since func() time.Duration) error {
	in := readers.Get().(*bufio.Reader)
	in.Reset(body)
	defer func() {
		in.Reset(nil)
		readers.Put(in)
	}()
	s := stream{r: r, since: since, anthropic: dialect == fleet.DialectAnthropic}
	for {
		line, err := in.ReadSlice('\n')
		// A line longer than the buffer is judged by its beginning.
		s.line(line)
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = in.ReadSlice('\n')
		}
		if err == nil {
			continue
		}
		if s.tokens > 0 {
			r.Tokens = s.tokens
		}
		switch {
		case s.failure != "":
			return fmt.Errorf("error event: %s", s.failure)
		case !errors.Is(err, io.EOF):
			return err
		case !s.ended:
			return errors.New("the stream ended without its last event")
		}
		return nil
	}
}

// stream is what was seen of an answer so far.
type stream struct {
	r         *Result
	since     func() time.Duration
	anthropic bool
	failure   string // the first error event
	ended     bool
	tokens    int // by the usage field
}

func (s *stream) line(line []byte) {
	data, found := bytes.CutPrefix(line, []byte("data:"))
	if !found {
		return // event names, comments and blank lines
	}
	data = bytes.TrimSpace(data)
	switch {
	case s.isEnd(data):
		s.ended = true
	case s.isError(data):
		if s.failure == "" {
			s.failure = string(data[:min(len(data), 256)])
		}
	case s.isContent(data):
		if s.r.FirstToken == 0 {
			s.r.FirstToken = s.since()
		}
		s.r.Tokens++
	case s.r.FirstToken > 0: // what Anthropic's first event reports is no count yet
		if n := usage(data); n > 0 {
			s.tokens = n
		}
	}
}

func (s *stream) isEnd(data []byte) bool {
	if s.anthropic {
		return hasType(data, "message_stop")
	}
	return string(data) == "[DONE]"
}

func (s *stream) isError(data []byte) bool {
	if s.anthropic {
		return hasType(data, "error")
	}
	after := value(data, `"error"`)
	return len(after) > 0 && after[0] != 'n' // not null
}

func (s *stream) isContent(data []byte) bool {
	if s.anthropic {
		return hasType(data, "content_block_delta")
	}
	return hasText(data, `"content"`) || hasText(data, `"reasoning_content"`) || hasText(data, `"text"`) ||
		bytes.Contains(data, []byte(`"tool_calls"`))
}

// hasType reports whether a "type" of the event is name.
func hasType(data []byte, name string) bool {
	after := value(data, `"type"`)
	return len(after) > len(name)+1 && after[0] == '"' && string(after[1:1+len(name)]) == name && after[1+len(name)] == '"'
}

// hasText reports whether the quoted key holds a string that is not empty.
func hasText(data []byte, key string) bool {
	after := value(data, key)
	return len(after) > 1 && after[0] == '"' && after[1] != '"'
}

// value returns what follows the quoted key's colon, at its first place, or nil.
func value(data []byte, key string) []byte {
	i := bytes.Index(data, []byte(key))
	if i < 0 {
		return nil
	}
	rest, found := bytes.CutPrefix(bytes.TrimLeft(data[i+len(key):], " \t\r\n"), []byte(":"))
	if !found {
		return nil
	}
	return bytes.TrimLeft(rest, " \t\r\n")
}

// usage finds the number of output tokens that an answer or event reports, or 0.
func usage(data []byte) int {
	for _, key := range []string{`"completion_tokens"`, `"output_tokens"`} {
		i := bytes.LastIndex(data, []byte(key))
		if i < 0 {
			continue
		}
		digits := value(data[i:], key)
		end := 0
		for end < len(digits) && digits[end] >= '0' && digits[end] <= '9' {
			end++
		}
		if n, err := strconv.Atoi(string(digits[:end])); err == nil {
			return n
		}
	}
	return 0
}
