package extproc

import (
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

func TestDeclaredTextReadsWhatServersWouldRead(t *testing.T) {
	for in, want := range map[string]fleet.Tokens{
		"512": 512, " 512 ": 512, "\t512\r\n": 512, "512.0": 512, "5.12e2": 512, "1e3": 1000, "1.5": 2, "0.2": 1,
		"9000.00": 9000, "9000.": 9000, "9_000": 9000, "9_0_0_0": 9000, "+9_000": 9000, "9_000.00": 9000, "1_0e0_2": 1000, "0__9_000": 9000,
		"9_000,16": 9000, "9_999_999_999": MaxBudget, "\u00a0512\u3000": 512, "\v512\f": 512, "\u0085512": 512,
		"+512": 512, "0512": 512, "16, 32000": 32000, "32000,16": 32000, "16,": 16, "abc,16": 16,
		"1e9": 1_000_000_000, "2147483647": MaxBudget, "2147483648": MaxBudget, "9223372036854775808": MaxBudget, "1e400": MaxBudget,
		strings.Repeat("9", 10_000): MaxBudget,
		// unusable
		"": 0, " ": 0, "0": 0, "-0": 0, "-1": 0, "NaN": 0, "inf": 0, "Infinity": 0, "true": 0, "null": 0, "[512]": 0, "{}": 0,
		"512abc": 0, "0x200": 0, "_9000": 0, "9000_": 0, "9000__": 0, "9_.0": 0, "9._0": 0, "9_e3": 0, "9e_3": 0,
		"+_9": 0, "-9_000": 0, "_": 0, "0_": 0, "9_a": 0, "0x2_0": 0, "５１２": 0, "\u200b512": 0, "\ufeff512": 0, "5 12": 0, "e": 0, "+": 0, ".": 0, "--5": 0, "1e-400": 0, "-1e400": 0, "512\x00": 0,
	} {
		got := DeclaredText([]byte(in))
		if got.Tokens != want || !got.Seen {
			t.Errorf("%.40q is %v; want %d", in, got, want)
		}
	}
}

// number is the oracle of FuzzDeclaredText: what one part of a list may look like.
var number = regexp.MustCompile(strings.ReplaceAll(`^[+-]?(D\.?|D\.D|\.D)([eE][+-]?D)?$`, "D", `[0-9](?:_*[0-9])*`))

// FuzzDeclaredText compares the reader with a regular expression and strconv.
func FuzzDeclaredText(f *testing.F) {
	for _, s := range []string{"512", " 9_000.00, +1e3", "0__9", "9__0", "_9,9_", "9_.5", "-1_0", "1e400", "0x_9", "\u00a07\u2003", "５１２", ",", "9_9e9_9"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		want := fleet.Tokens(0)
		for part := range strings.SplitSeq(s, ",") {
			part = strings.TrimSpace(part)
			if !number.MatchString(part) {
				continue
			}
			n, err := strconv.ParseFloat(strings.ReplaceAll(part, "_", ""), 64)
			if err != nil && !math.IsInf(n, 0) {
				t.Fatalf("%q is no number: %v", part, err)
			}
			if n > 0 {
				want = max(want, fleet.Tokens(math.Ceil(min(n, float64(MaxBudget)))))
			}
		}
		if got := DeclaredText([]byte(s)); got != (Declared{want, true}) {
			t.Errorf("%q is %+v; want %d", s, got, want)
		}
	})
}

func TestDeclaredNumberSaturatesAndRoundsUp(t *testing.T) {
	for in, want := range map[float64]fleet.Tokens{
		1: 1, 512: 512, 1.5: 2, 0.2: 1, 1e20: MaxBudget, 1e308: MaxBudget, math.Inf(1): MaxBudget, 1 << 53: MaxBudget,
		0: 0, -5: 0, -9.22e18: 0, math.Inf(-1): 0,
	} {
		if got := DeclaredNumber(in); got.Tokens != want || !got.Seen {
			t.Errorf("%v is %v; want %d", in, got, want)
		}
	}
	if got := DeclaredNumber(math.NaN()); got.Tokens != 0 {
		t.Errorf("NaN is %v", got)
	}
}

func TestBudgetTakesTheLargerAndNeverTheLowestOnDoubt(t *testing.T) {
	n := func(tokens fleet.Tokens) Declared { return Declared{tokens, true} }
	junk := Declared{Seen: true}
	var none Declared
	for _, row := range []struct {
		name   string
		in     BudgetInput
		want   fleet.Tokens
		source BudgetSource
	}{
		{"nothing", BudgetInput{Header: none, Body: none}, 512, BudgetDefault},
		{"header", BudgetInput{Header: n(16)}, 16, BudgetHeader},
		{"body", BudgetInput{Body: n(16)}, 16, BudgetBody},
		{"both agree", BudgetInput{Header: n(16), Body: n(16)}, 16, BudgetAgreed},
		{"body larger", BudgetInput{Header: n(16), Body: n(32000)}, 32000, BudgetMismatch},
		{"header larger", BudgetInput{Header: n(32000), Body: n(16)}, 32000, BudgetMismatch},
		{"junk in header", BudgetInput{Header: junk}, 512, BudgetInvalid},
		{"junk in body", BudgetInput{Body: junk}, 512, BudgetInvalid},
		{"junk in header, body good", BudgetInput{Header: junk, Body: n(9)}, 9, BudgetBody},
		{"junk in body, header good", BudgetInput{Header: n(9), Body: junk}, 9, BudgetHeader},
		{"body broken", BudgetInput{BodyError: true}, 512, BudgetUnreadable},
		{"body broken, small header", BudgetInput{Header: n(9), BodyError: true}, 512, BudgetUnreadable},
		{"body broken, large header", BudgetInput{Header: n(9000), BodyError: true}, 9000, BudgetUnreadable},
		{"body unread, small header", BudgetInput{Header: n(9), BodyUnread: true}, 512, BudgetUnread},
		{"header trusted", BudgetInput{Header: n(9), Body: n(99), BodyUnread: true, TrustDeclared: true}, 9, BudgetHeader},
		{"header trusted, junk", BudgetInput{Header: junk, Body: n(99), TrustDeclared: true}, 99, BudgetBody},
		{"header trusted, absent", BudgetInput{Body: n(99), TrustDeclared: true}, 99, BudgetBody},
		{"header trusted, junk alone", BudgetInput{Header: junk, TrustDeclared: true}, 512, BudgetInvalid},
		{"header trusted, absent, body broken", BudgetInput{BodyError: true, TrustDeclared: true}, 512, BudgetUnreadable},
	} {
		row.in.Default = 512
		if got, source := Budget(row.in); got != row.want || source != row.source {
			t.Errorf("%s: %d, %s; want %d, %s", row.name, got, source, row.want, row.source)
		}
	}
}

func TestDeclarationsJoinToTheLargest(t *testing.T) {
	m := chat(map[string]string{"max_tokens": "16", "x-max-tokens": "700", "max-tokens": "junk"})
	m.peek = map[string]any{"max_tokens": nil, "max_completion_tokens": 2000.0, "max_output_tokens": "30"}
	w := newWorld(t)
	w.ask(t, m)
	if e := w.lastEvent(); e.Budget != 2000 || e.BudgetSource != BudgetMismatch || e.Level != fleet.LevelOf(2000) {
		t.Errorf("budget %d from %s", e.Budget, e.BudgetSource)
	}
}

// TestBudgetCorpus: what clients send, as Envoy 1.40.0 hands it over (measured):
// of a body that it parsed the top-level fields, or read where there is none of
// use; of one that it couldn't parse error alone; nothing of one that it didn't
// look at. Every row goes on to the upstream, which knows how to refuse it.
func TestBudgetCorpus(t *testing.T) {
	type fields = map[string]any
	parsed := func(v any) fields { return fields{"max_tokens": v, "model": "m"} }
	nothing, broken := fields{"read": true}, fields{"error": true}
	const top, preset = MaxBudget, fleet.Tokens(700)
	for _, row := range []struct {
		name   string
		header string // max_tokens; "-" is an empty one
		peek   fields
		want   fleet.Tokens
		source BudgetSource
	}{
		{"512", "", parsed(512), 512, BudgetBody},
		{"512.0 and 5.12e2", "", parsed(512.0), 512, BudgetBody},
		{"text", "", parsed("512"), 512, BudgetBody},
		{"text with white space", "", parsed(" 512\n"), 512, BudgetBody},
		{"escaped key, byte order mark", "", parsed(512), 512, BudgetBody},
		{"chunked, or above the length that is looked at", "", nil, preset, BudgetUnread},
		{"fraction", "", parsed(1.5), 2, BudgetBody},
		{"1e9", "", parsed(1e9), 1e9, BudgetBody},
		{"2^31", "", parsed(2147483648.0), top, BudgetBody},
		{"20 digits", "", parsed(1e20), top, BudgetBody},
		{"2^63 to 2^64, 1e400, 10,000 digits, NaN", "", broken, preset, BudgetUnreadable},
		{"text of 10,000 digits, as a number", "", parsed(math.Inf(1)), top, BudgetBody},
		{"text of 10,000 blanks and nan, as a number", "", parsed(math.NaN()), preset, BudgetInvalid},
		{"text of 10,000 blanks and 9000, as a number", "", parsed(9000.0), 9000, BudgetBody},
		{"text of 10,000 blanks and 9_000 is above 8 KiB", "", nothing, preset, BudgetDefault},
		{"text of 8,000 digits", "", parsed(strings.Repeat("9", 8000)), top, BudgetBody},
		{"absent, null, list, object, nested, inside the prompt, other case", "", nothing, preset, BudgetDefault},
		{"empty text", "", parsed(""), preset, BudgetInvalid},
		{"-1", "", parsed(-1), preset, BudgetInvalid},
		{"-2^63", "", parsed(-9.22e18), preset, BudgetInvalid},
		{"0 and -0", "", parsed(0), preset, BudgetInvalid},
		{"true", "", parsed(true), preset, BudgetInvalid},
		{"512abc", "", parsed("512abc"), preset, BudgetInvalid},
		{"0x200", "", parsed("0x200"), preset, BudgetInvalid},
		{"full-width digits", "", parsed("５１２"), preset, BudgetInvalid},
		{"9_000", "", parsed("9_000"), 9000, BudgetBody},
		{"9000.00", "", parsed("9000.00"), 9000, BudgetBody},
		{"no-break spaces", "", parsed("\u00a0512\u00a0"), 512, BudgetBody},
		{"9000_", "", parsed("9000_"), preset, BudgetInvalid},
		{"NaN as text", "", parsed("NaN"), preset, BudgetInvalid},
		{"broken, truncated, UTF-16, gzip, multipart, two documents, 1,000 levels", "", broken, preset, BudgetUnreadable},
		{"16 then 32000: the last counts", "", parsed(32000), 32000, BudgetBody},
		{"32000 then 16: the last counts", "", parsed(16), 16, BudgetBody},
		{"max_completion_tokens beside", "", fields{"max_tokens": 16, "max_completion_tokens": 32000}, 32000, BudgetBody},
		{"max_output_tokens beside", "", fields{"max_tokens": 32000, "max_output_tokens": 16}, 32000, BudgetBody},
		{"junk beside a number", "", fields{"max_tokens": "junk", "max_completion_tokens": 30}, 30, BudgetBody},
		{"other spellings: generationConfig, num_predict, max_new_tokens", "", nothing, preset, BudgetDefault},
		{"header smaller", "16", parsed(32000), 32000, BudgetMismatch},
		{"header larger", "32000", parsed(16), 32000, BudgetMismatch},
		{"header agrees", "512", parsed(512), 512, BudgetAgreed},
		{"header alone", "512", nothing, 512, BudgetHeader},
		{"header with a list", "16, 32000", parsed(20), 32000, BudgetMismatch},
		{"header with a sign", "+512", nothing, 512, BudgetHeader},
		{"header with a digit separator", "9_000", parsed("16"), 9000, BudgetMismatch},
		{"header empty", "-", parsed(512), 512, BudgetBody},
		{"header empty and nothing else", "-", nothing, preset, BudgetInvalid},
		{"header, body unreadable", "16", broken, preset, BudgetUnreadable},
		{"header, body not looked at", "16", nil, preset, BudgetUnread},
		{"large header, body not looked at", "16000", nil, 16000, BudgetUnread},
		{"header above all", "99999999999999999999", nothing, top, BudgetHeader},
	} {
		w, g := gated(t, func(in *plan.Inputs, _ *Options) { in.Routes[0].DefaultBudget = preset })
		m := message{route: "chat", cluster: "h100", peek: row.peek, headers: map[string]string{}}
		if row.header != "" {
			m.headers["max_tokens"] = strings.TrimPrefix(row.header, "-")
		}
		if r := w.ask(t, m); r.GetRequestHeaders() == nil {
			t.Errorf("%s: %v", row.name, r)
		}
		e := w.lastEvent()
		if e.Budget != row.want || e.BudgetSource != row.source || e.Level != fleet.LevelOf(row.want) {
			t.Errorf("%s: %d from %s, level %d; want %d from %s", row.name, e.Budget, e.BudgetSource, e.Level, row.want, row.source)
		}
		if g.last().Output != row.want {
			t.Errorf("%s: %d tokens are reserved; want %d", row.name, g.last().Output, row.want)
		}
	}
}

func TestNoBodyIsNotAnUnreadOne(t *testing.T) {
	w := newWorld(t)
	w.ask(t, message{route: "chat", cluster: "h100", noBody: true})
	if e := w.lastEvent(); e.Budget != 512 || e.BudgetSource != BudgetDefault {
		t.Errorf("%d from %s", e.Budget, e.BudgetSource)
	}
}
