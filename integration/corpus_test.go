package integration

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// corpusRow is one way to declare an output budget, or to hide one.
type corpusRow struct {
	name    string
	body    string
	headers []string
	how     sending
	// budget is per answer; n, if not 0, is how many answers are asked for.
	budget fleet.Tokens
	n      int64
	source extproc.BudgetSource
	// refused: the body is not JSON, which the server says itself.
	refused bool
}

// sending is how a body travels.
type sending uint8

const (
	withLength sending = iota
	chunked
	byteForByte
)

// corpusDefault is the budget of requests whose own could not be read.
const corpusDefault = 640

// corpus holds every case of an output budget that is known to have gone wrong
// somewhere. The rule: a budget is classed and never edited, its keys count at
// the top level only, and on doubt the larger budget counts, or the route's
// default, never the smallest. What differs from that rule is what Envoy's
// json_to_metadata filter makes possible (measured on Envoy 1.40.0): of
// duplicate keys the last counts, as for Python's json module, which most
// servers read with; containers and null are as if absent, and so is text of more
// than 8 KiB in which Envoy finds no number; a whole number from 2^63 to 2^64−1,
// or one beyond a double, spoils the whole document.
func corpus(t *testing.T) []corpusRow {
	const (
		top  = extproc.MaxBudget
		none = fleet.Tokens(corpusDefault)
	)
	long := strings.Repeat("x", 200_000)
	blanks := strings.Repeat(" ", 9000)
	r := func(name, body string, budget fleet.Tokens, source extproc.BudgetSource, headers ...string) corpusRow {
		return corpusRow{name: name, body: body, budget: budget, source: source, headers: headers}
	}
	broken := func(name, body string, headers ...string) corpusRow {
		row := r(name, body, none, extproc.BudgetUnreadable, headers...)
		row.refused = true
		return row
	}
	times := func(n int64, row corpusRow) corpusRow { row.n = n; return row }
	by := func(how sending, row corpusRow) corpusRow { row.how = how; return row }
	asked := func(value string) string { return `{"max_tokens":` + value + `}` }
	return []corpusRow{
		// The same as 512.
		r("512", asked("512"), 512, extproc.BudgetBody),
		r("white space and newlines", "\r\n{\n\t\"max_tokens\" \n:\r\n 512 \n}\n ", 512, extproc.BudgetBody),
		r("512.0", asked("512.0"), 512, extproc.BudgetBody),
		r("5.12e2", asked("5.12e2"), 512, extproc.BudgetBody),
		r("512 as text", asked(`"512"`), 512, extproc.BudgetBody),
		r("512 as text, with spaces", asked(`" 512\n"`), 512, extproc.BudgetBody),
		r("512 as text, with no-break spaces", asked(`"\u00a0512\u00a0"`), 512, extproc.BudgetBody),
		r("512.00 as text", asked(`"512.00"`), 512, extproc.BudgetBody),
		r("digit separator as text", asked(`"5_12"`), 512, extproc.BudgetBody),
		r("digit separators behind zeros as text", asked(`"0__512"`), 512, extproc.BudgetBody),
		r("escaped key", `{"max\u005ftokens":512}`, 512, extproc.BudgetBody),
		r("wholly escaped key", `{"\u006d\u0061\u0078\u005f\u0074\u006f\u006b\u0065\u006e\u0073":512}`, 512, extproc.BudgetBody),
		r("byte order mark", "\ufeff"+asked("512"), 512, extproc.BudgetBody),
		by(byteForByte, r("byte for byte", `{"max_tokens":512,"prompt":"`+strings.Repeat("é", 100)+`"}`, 512, extproc.BudgetBody)),
		r("before a long prompt", `{"max_tokens":512,"prompt":"`+long+`"}`, 512, extproc.BudgetBody),
		r("behind a long prompt", `{"prompt":"`+long+`","max_tokens":512}`, 512, extproc.BudgetBody),
		r("between two long prompts", `{"prompt":"`+long+`","max_tokens":512,"suffix":"`+long+`"}`, 512, extproc.BudgetBody),
		r("a fraction counts up", asked("511.5"), 512, extproc.BudgetBody),
		r("1e3", asked("1e3"), 1000, extproc.BudgetBody),
		r("one token", asked("1"), 1, extproc.BudgetBody),
		r("less than one token", asked("0.001"), 1, extproc.BudgetBody),
		r("max_completion_tokens", `{"max_completion_tokens":512}`, 512, extproc.BudgetBody),
		r("max_output_tokens", `{"max_output_tokens":512}`, 512, extproc.BudgetBody),

		// Envoy drops text beyond 8 KiB, and takes the number out of it.
		r("blanks and 9000 as text", asked(`"`+blanks+`9000"`), 9000, extproc.BudgetBody),
		r("9000 and blanks as text", asked(`"9000`+blanks+`"`), 9000, extproc.BudgetBody),
		r("newlines and 9000 as text", asked(`"`+strings.Repeat(`\n`, 9000)+`9000"`), 9000, extproc.BudgetBody),
		r("zeros and 9000 as text", asked(`"`+strings.Repeat("0", 9000)+`9000"`), 9000, extproc.BudgetBody),
		r("9000 with zeros behind the point as text", asked(`"9000.`+strings.Repeat("0", 9000)+`"`), 9000, extproc.BudgetBody),
		r("900,000 blanks and 9000 as text", asked(`"`+strings.Repeat(blanks, 100)+`9000"`), 9000, extproc.BudgetBody),
		r("blanks beside a small number", `{"max_tokens":16,"max_completion_tokens":"`+blanks+`9000"}`, 9000, extproc.BudgetBody),
		r("blanks in max_output_tokens", `{"max_tokens":16,"max_output_tokens":"`+blanks+`9000"}`, 9000, extproc.BudgetBody),

		// The top level: numbers saturate.
		r("1e9", asked("1e9"), 1_000_000_000, extproc.BudgetBody),
		r("2^31−1", asked("2147483647"), top, extproc.BudgetBody),
		r("2^31", asked("2147483648"), top, extproc.BudgetBody),
		r("2^53+1", asked("9007199254740993"), top, extproc.BudgetBody),
		r("2^63−1", asked("9223372036854775807"), top, extproc.BudgetBody),
		r("20 digits", asked("99999999999999999999"), top, extproc.BudgetBody),
		r("1e308", asked("1e308"), top, extproc.BudgetBody),
		r("1e400 as text", asked(`"1e400"`), top, extproc.BudgetBody),
		r("8,193 digits as text", asked(`"`+strings.Repeat("9", 8193)+`"`), top, extproc.BudgetBody),
		r("8,000 digits as text", asked(`"`+strings.Repeat("9", 8000)+`"`), top, extproc.BudgetBody),

		// Envoy gives such a document up. Servers may well take it.
		r("2^63", asked("9223372036854775808"), none, extproc.BudgetUnreadable),
		r("2^64−1", asked("18446744073709551615"), none, extproc.BudgetUnreadable),
		r("2^63 in another field", `{"max_tokens":4,"seed":9223372036854775808}`, none, extproc.BudgetUnreadable),
		r("1e400", asked("1e400"), none, extproc.BudgetUnreadable),
		r("10,000 digits", asked(strings.Repeat("9", 10_000)), none, extproc.BudgetUnreadable),
		r("lone surrogate", `{"max_tokens":4,"prompt":"\ud800"}`, none, extproc.BudgetUnreadable),
		r("1,000 levels", `{"max_tokens":4,"x":`+strings.Repeat("[", 1000)+strings.Repeat("]", 1000)+`}`, none, extproc.BudgetUnreadable),

		// Nothing is declared.
		r("absent", `{"model":"m"}`, none, extproc.BudgetDefault),
		r("empty object", `{}`, none, extproc.BudgetDefault),
		r("empty body", ``, none, extproc.BudgetDefault),
		r("null", asked("null"), none, extproc.BudgetDefault),
		r("array", asked("[4]"), none, extproc.BudgetDefault),
		r("object", asked(`{"value":4}`), none, extproc.BudgetDefault),
		r("top-level array", `[{"max_tokens":4}]`, none, extproc.BudgetDefault),
		r("top-level number", `4`, none, extproc.BudgetDefault),
		r("text beyond 8 KiB", asked(`"`+strings.Repeat("x", 8193)+`"`), none, extproc.BudgetDefault),
		r("blanks and a digit separator as text", asked(`"`+blanks+`9_000"`), none, extproc.BudgetDefault),
		r("no-break spaces beyond 8 KiB as text", asked(`"`+strings.Repeat(`\u00a0`, 4097)+`9000"`), none, extproc.BudgetDefault),

		// Something is declared that is no budget.
		r("empty text", asked(`""`), none, extproc.BudgetInvalid),
		r("blanks and NaN as text", asked(`"`+blanks+`NaN"`), none, extproc.BudgetInvalid),
		r("blanks and −1 as text", asked(`"`+blanks+`-1"`), none, extproc.BudgetInvalid),
		r("−1", asked("-1"), none, extproc.BudgetInvalid),
		r("−0", asked("-0"), none, extproc.BudgetInvalid),
		r("0", asked("0"), none, extproc.BudgetInvalid),
		r("0.0", asked("0.0"), none, extproc.BudgetInvalid),
		r("−2^63−1", asked("-9223372036854775809"), none, extproc.BudgetInvalid),
		r("true", asked("true"), none, extproc.BudgetInvalid),
		r("NaN as text", asked(`"NaN"`), none, extproc.BudgetInvalid),
		r("text with junk", asked(`"4abc"`), none, extproc.BudgetInvalid),
		r("hexadecimal text", asked(`"0x4"`), none, extproc.BudgetInvalid),
		r("full-width digits as text", asked(`"５１２"`), none, extproc.BudgetInvalid),
		r("digit separator at the end of text", asked(`"1000_"`), none, extproc.BudgetInvalid),
		r("zero byte in text", asked(`"4\u0000"`), none, extproc.BudgetInvalid),

		// Broken bodies go on, and the server refuses them.
		broken("NaN", asked("NaN")),
		broken("4abc", asked("4abc")),
		broken("0x4", asked("0x4")),
		broken("leading zero", asked("04")),
		broken("plus sign", asked("+4")),
		broken("full-width digits", asked("５１２")),
		broken("digit separator", asked("1_000")),
		broken("truncated", `{"max_tokens":4,"prompt":"abc`),
		broken("truncated behind the number", `{"max_tokens":4`),
		broken("trailing comma", `{"max_tokens":4,}`),
		broken("single quotes", `{'max_tokens':4}`),
		broken("a comment", `{"max_tokens":4 /* few */}`),
		broken("two documents", `{"max_tokens":4}{"max_tokens":4}`),
		broken("a second document with more", `{"model":"m"}`+"\n"+`{"max_tokens":999999}`),
		broken("text behind the document", `{"max_tokens":4} xyz`),
		broken("white space alone", "  \n "),
		broken("a zero byte", "{\"max_tokens\":4,\x00\"a\":1}"),
		broken("UTF-16", utf16Text(asked("4"))),
		broken("gzip", gzipped(t, asked("4")), "content-encoding", "gzip"),
		broken("zstd", "\x28\xb5\x2f\xfd\x04\x00\x81\x00\x00{\"max_tokens\":4}\x99\xe9\xd8\x51", "content-encoding", "zstd"),
		broken("brotli", "\x0b\x07\x80{\"max_tokens\":4}\x03", "content-encoding", "br"),
		broken("unclosed, a million levels", strings.Repeat("[", 900_000)),
		// encoding/json reads invalid UTF-8 as U+FFFD; Envoy gives it up.
		r("invalid UTF-8", "{\"max_tokens\":4,\"prompt\":\"\xff\"}", none, extproc.BudgetUnreadable),
		r("labelled gzip, but plain", asked("512"), 512, extproc.BudgetBody, "content-encoding", "gzip"),

		// Content types.
		r("with a charset", asked("512"), 512, extproc.BudgetBody, "content-type", "application/json; charset=utf-8"),
		r("a vendor's JSON", asked("512"), 512, extproc.BudgetBody, "content-type", "application/vnd.api+json"),
		r("text/plain", asked("4"), none, extproc.BudgetUnreadable, "content-type", "text/plain"),
		r("in capitals", asked("512"), 512, extproc.BudgetBody, "content-type", "APPLICATION/JSON"),
		broken("multipart", "--b\r\ncontent-disposition: form-data; name=\"max_tokens\"\r\n\r\n4\r\n--b--\r\n", "content-type", "multipart/form-data; boundary=b"),
		broken("form", "max_tokens=4", "content-type", "application/x-www-form-urlencoded"),

		// Must be ignored.
		r("in the prompt", `{"prompt":"\"max_tokens\":999999"}`, none, extproc.BudgetDefault),
		r("in the prompt, escaped twice", `{"prompt":"\\\"max_tokens\\\":999999"}`, none, extproc.BudgetDefault),
		r("in the prompt, by code", `{"prompt":"\u0022max_tokens\u0022:999999,"}`, none, extproc.BudgetDefault),
		r("in the prompt, beside the real one", `{"prompt":"\",\"max_tokens\":999999,\"","max_tokens":16}`, 16, extproc.BudgetBody),
		r("in a tool's parameters", `{"tools":[{"type":"function","function":{"name":"f","parameters":{"max_tokens":999999}}}]}`, none, extproc.BudgetDefault),
		r("in metadata", `{"metadata":{"max_tokens":999999}}`, none, extproc.BudgetDefault),
		r("in messages", `{"messages":[{"role":"user","max_tokens":999999}],"max_tokens":16}`, 16, extproc.BudgetBody),
		r("deep in arrays", `{"x":`+strings.Repeat("[", 900)+`{"max_tokens":999999}`+strings.Repeat("]", 900)+`,"max_tokens":16}`, 16, extproc.BudgetBody),
		r("other case of the key", `{"Max_Tokens":999999}`, none, extproc.BudgetDefault),
		r("key with a space", `{"max_tokens ":999999}`, none, extproc.BudgetDefault),
		r("key with a zero byte", `{"max_tokens\u0000":999999}`, none, extproc.BudgetDefault),

		// Other dialects' spellings count on routes of those dialects, of which
		// there are none.
		r("generationConfig", `{"generationConfig":{"maxOutputTokens":999999}}`, none, extproc.BudgetDefault),
		r("num_predict", `{"options":{"num_predict":999999}}`, none, extproc.BudgetDefault),
		r("max_new_tokens", `{"parameters":{"max_new_tokens":999999}}`, none, extproc.BudgetDefault),
		r("max_tokens_to_sample", `{"max_tokens_to_sample":999999}`, none, extproc.BudgetDefault),

		// Several at once.
		r("duplicate, the last larger", `{"max_tokens":16,"max_tokens":32000}`, 32000, extproc.BudgetBody),
		r("duplicate, the last smaller", `{"max_tokens":32000,"max_tokens":16}`, 16, extproc.BudgetBody),
		r("duplicate, the last null", `{"max_tokens":16,"max_tokens":null}`, none, extproc.BudgetDefault),
		r("duplicate, one escaped", `{"max_tokens":16,"max\u005ftokens":32000}`, 32000, extproc.BudgetBody),
		r("max_completion_tokens larger", `{"max_tokens":16,"max_completion_tokens":32000}`, 32000, extproc.BudgetBody),
		r("max_completion_tokens smaller", `{"max_completion_tokens":16,"max_tokens":32000}`, 32000, extproc.BudgetBody),
		r("max_output_tokens larger", `{"max_tokens":16,"max_output_tokens":32000}`, 32000, extproc.BudgetBody),
		r("null beside a number", `{"max_tokens":null,"max_completion_tokens":30}`, 30, extproc.BudgetBody),
		r("junk beside a number", `{"max_tokens":"many","max_completion_tokens":30}`, 30, extproc.BudgetBody),
		times(4, r("n multiplies", `{"max_tokens":100,"n":4}`, 100, extproc.BudgetBody)),
		times(4, r("n behind blanks as text", `{"max_tokens":100,"n":"`+blanks+`4"}`, 100, extproc.BudgetBody)),
		times(4, r("n without a budget", `{"n":4}`, none, extproc.BudgetDefault)),
		r("n of nothing", `{"max_tokens":100,"n":0}`, 100, extproc.BudgetBody),
		r("n that is no number", `{"max_tokens":100,"n":"x"}`, 100, extproc.BudgetBody),
		r("n below nothing", `{"max_tokens":100,"n":-4}`, 100, extproc.BudgetBody),

		// In headers.
		r("header alone", `{"model":"m"}`, 16, extproc.BudgetHeader, "max_tokens", "16"),
		r("header, other spelling", `{"model":"m"}`, 16, extproc.BudgetHeader, "max-tokens", "16"),
		r("header, third spelling", `{"model":"m"}`, 16, extproc.BudgetHeader, "X-Max-Tokens", "16"),
		r("header and body agree", asked("16"), 16, extproc.BudgetAgreed, "x-max-tokens", "16"),
		r("header smaller", asked("32000"), 32000, extproc.BudgetMismatch, "x-max-tokens", "16"),
		r("header larger", asked("16"), 32000, extproc.BudgetMismatch, "x-max-tokens", "32000"),
		r("header, body of null", asked("null"), 16, extproc.BudgetHeader, "x-max-tokens", "16"),
		r("header, body of junk", asked(`"many"`), 16, extproc.BudgetHeader, "x-max-tokens", "16"),
		r("two headers", `{"model":"m"}`, 32000, extproc.BudgetHeader, "x-max-tokens", "16", "x-max-tokens", "32000"),
		r("two spellings", `{"model":"m"}`, 32000, extproc.BudgetHeader, "x-max-tokens", "16", "max_tokens", "32000"),
		r("two headers and a body", asked("700"), 32000, extproc.BudgetMismatch, "x-max-tokens", "16", "max-tokens", "32000"),
		r("list in a header", `{"model":"m"}`, 32000, extproc.BudgetHeader, "x-max-tokens", "16, 32000"),
		r("header with a sign", `{"model":"m"}`, 512, extproc.BudgetHeader, "x-max-tokens", "+512"),
		r("header with a digit separator", `{"model":"m"}`, 512, extproc.BudgetHeader, "x-max-tokens", "5_12"),
		r("header with spaces", `{"model":"m"}`, 512, extproc.BudgetHeader, "x-max-tokens", "  512  "),
		r("empty header", `{"model":"m"}`, none, extproc.BudgetInvalid, "x-max-tokens", ""),
		r("empty header, body", asked("16"), 16, extproc.BudgetBody, "x-max-tokens", ""),
		r("negative header", `{"model":"m"}`, none, extproc.BudgetInvalid, "x-max-tokens", "-5"),
		r("header of junk", `{"model":"m"}`, none, extproc.BudgetInvalid, "x-max-tokens", "16abc"),
		r("small header, broken body", `{"max_tokens":99`, none, extproc.BudgetUnreadable, "x-max-tokens", "16").asRefused(),
		r("large header, broken body", `{"max_tokens":99`, 32000, extproc.BudgetUnreadable, "x-max-tokens", "32000").asRefused(),

		// What Envoy does not look into.
		by(chunked, r("chunked", asked("4"), none, extproc.BudgetUnread)),
		by(chunked, r("chunked, small header", asked("4"), none, extproc.BudgetUnread, "x-max-tokens", "16")),
		by(chunked, r("chunked, large header", asked("4"), 32000, extproc.BudgetUnread, "x-max-tokens", "32000")),
		r("999,999 bytes", padded(`{"max_tokens":512,"prompt":"`, 999_999), 512, extproc.BudgetBody),
		r("a million bytes", padded(`{"max_tokens":4,"prompt":"`, 1_000_000), none, extproc.BudgetUnread),
		r("behind 10 MiB", `{"prompt":"`+strings.Repeat("x", 10<<20)+`","max_tokens":4}`, none, extproc.BudgetUnread),
	}
}

func (c corpusRow) asRefused() corpusRow { c.refused = true; return c }

// padded is a JSON object of exactly size bytes that begins so, inside a string.
func padded(head string, size int) string {
	return head + strings.Repeat("x", size-len(head)-2) + `"}`
}

// send sends a row, and checks that the body reached the server as it was sent
// and that the client got the server's answer.
func (c corpusRow) send(t *testing.T, with *http.Client, address string, m *modelServer) answer {
	t.Helper()
	before := m.count.Load()
	var a answer
	var err error
	if c.how == byteForByte {
		a, err = bytewise(address, chatPath, c.body)
	} else {
		a, err = ask(t.Context(), with, "http://"+address+chatPath, c.body, c.how == chunked, c.headers...)
	}
	if err != nil {
		t.Errorf("%s: %v", c.name, err)
		return a
	}
	status := http.StatusOK
	if c.refused {
		status = http.StatusBadRequest
	}
	if a.status != status || (c.refused && a.body != notJSON) {
		t.Errorf("%s: status %d, want %d: %.300s", c.name, a.status, status, a.body)
	}
	got, length := m.lastArrived(), int64(len(c.body))
	if c.how == chunked {
		length = -1
	}
	if n := m.count.Load() - before; n != 1 || got.sum != digest([]byte(c.body)) || got.length != length {
		t.Errorf("%s: the server got %d requests, %d bytes with content-length %d; want one with the %d bytes sent and %d", c.name, n, got.bodyLen, got.length, len(c.body), length)
	}
	return a
}

// TestBodyCorpus sends every row through the builders' configuration and looks
// at what ext_proc made of it.
func TestBodyCorpus(t *testing.T) {
	m := newModelServer(t)
	s := startSteered(t, shape{text: shapeHead + fmt.Sprintf(`
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [ trusted, chat ] }
pools:
- { name: a, endpoints: [ { address: %q } ] }
routes:
- { name: trusted, match: { prefix: /trusted }, dialect: openai, pool: a, trustDeclared: true, defaultMaxTokens: %d }
- { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, defaultMaxTokens: %d }
`, m.addr(), corpusDefault, corpusDefault)})
	for _, row := range corpus(t) {
		row.send(t, s.client, s.addr.String(), m)
		if e := s.lastEvent(); e.Budget != row.budget || e.BudgetSource != row.source || e.Level != fleet.LevelOf(row.budget) || !e.Generates {
			t.Errorf("%s: %d from %s at level %d; want %d from %s at level %d", row.name, e.Budget, e.BudgetSource, e.Level,
				row.budget, row.source, fleet.LevelOf(row.budget))
		}
	}

	// A route that trusts the header believes it alone; without one that can be
	// read the body counts as anywhere.
	for _, row := range []struct {
		header string
		want   fleet.Tokens
		source extproc.BudgetSource
	}{
		{"16", 16, extproc.BudgetHeader},
		{"junk", 32000, extproc.BudgetBody},
		{"", 32000, extproc.BudgetBody},
	} {
		r := s.postJSON("/trusted"+chatPath, `{"max_tokens":32000}`, "max_tokens", row.header)
		if e := s.lastEvent(); r.status != 200 || e.Route != "trusted" || e.Budget != row.want || e.BudgetSource != row.source {
			t.Errorf("trusted, header %q: status %d, %d from %s; want %d from %s", row.header, r.status, e.Budget, e.BudgetSource, row.want, row.source)
		}
	}
}
