package extproc

import (
	"math"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

func TestDeclaredTextReadsWhatServersWouldRead(t *testing.T) {
	for in, want := range map[string]fleet.Tokens{
		"512": 512, " 512 ": 512, "\t512\r\n": 512, "512.0": 512, "5.12e2": 512, "1e3": 1000, "1.5": 2, "0.2": 1,
		"+512": 512, "0512": 512, "16, 32000": 32000, "32000,16": 32000, "16,": 16, "abc,16": 16,
		"1e9": 1_000_000_000, "2147483647": MaxBudget, "2147483648": MaxBudget, "9223372036854775808": MaxBudget, "1e400": MaxBudget,
		strings.Repeat("9", 10_000): MaxBudget,
		// unusable
		"": 0, " ": 0, "0": 0, "-0": 0, "-1": 0, "NaN": 0, "inf": 0, "Infinity": 0, "true": 0, "null": 0, "[512]": 0, "{}": 0,
		"512abc": 0, "0x200": 0, "1_000": 0, "５１２": 0, "5 12": 0, "e": 0, "+": 0, ".": 0, "--5": 0, "1e-400": 0, "-1e400": 0, "512\x00": 0,
	} {
		got := DeclaredText([]byte(in))
		if got.Tokens != want || !got.Seen {
			t.Errorf("%.40q is %v; want %d", in, got, want)
		}
	}
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

func TestBudgetOfBodiesAsEnvoyExposesThem(t *testing.T) {
	for _, row := range []struct {
		name   string
		peek   map[string]any
		noBody bool
		want   fleet.Tokens
		source BudgetSource
	}{
		{"number", map[string]any{"max_tokens": 77}, false, 77, BudgetBody},
		{"text", map[string]any{"max_tokens": "100"}, false, 100, BudgetBody},
		{"bool", map[string]any{"max_tokens": true}, false, 512, BudgetInvalid},
		{"object", map[string]any{"max_tokens": map[string]any{"a": 1}}, false, 512, BudgetInvalid},
		{"negative", map[string]any{"max_tokens": -5}, false, 512, BudgetInvalid},
		{"zero", map[string]any{"max_tokens": 0}, false, 512, BudgetInvalid},
		{"2^64 and more", map[string]any{"max_tokens": 1e20}, false, MaxBudget, BudgetBody},
		{"only the model", map[string]any{"model": "m"}, false, 512, BudgetDefault},
		{"none of the keys", map[string]any{"read": true}, false, 512, BudgetDefault},
		{"broken", map[string]any{"error": true}, false, 512, BudgetUnreadable},
		{"not looked at", nil, false, 512, BudgetUnread},
		{"no body at all", nil, true, 512, BudgetDefault},
	} {
		w := newWorld(t)
		w.ask(t, message{route: "chat", cluster: "h100", peek: row.peek, noBody: row.noBody})
		if e := w.lastEvent(); e.Budget != row.want || e.BudgetSource != row.source {
			t.Errorf("%s: %d from %s; want %d from %s", row.name, e.Budget, e.BudgetSource, row.want, row.source)
		}
	}
}
