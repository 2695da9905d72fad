package extproc

import (
	"bytes"
	"math"
	"strconv"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// MaxBudget is where budgets saturate; it lies far above every burst level.
const MaxBudget fleet.Tokens = math.MaxInt32

// BudgetSource says where a request's output budget comes from.
type BudgetSource uint8

// Budget sources.
const (
	BudgetDefault    BudgetSource = iota + 1 // nothing declared: the route's default
	BudgetHeader                             // the max_tokens header (or a spelling of it)
	BudgetBody                               // the body's own field
	BudgetAgreed                             // header and body say the same
	BudgetMismatch                           // header and body differ: the larger
	BudgetInvalid                            // declared, but no usable number: the route's default
	BudgetUnreadable                         // broken body or not JSON: the header or the route's default, the larger
	BudgetUnread                             // Envoy read no body (too large, chunked): the same
)

var budgetSources = [...]string{"none", "default", "header", "body", "agreed", "mismatch", "invalid", "unreadable", "unread"}

// String is the source's metric label.
func (s BudgetSource) String() string {
	if int(s) >= len(budgetSources) {
		return budgetSources[0]
	}
	return budgetSources[s]
}

// guessed reports whether there is a body that nobody could read: prompt and
// budget are then what the route takes for them.
func (s BudgetSource) guessed() bool { return s == BudgetUnreadable || s == BudgetUnread }

// Declared is what one place, or several together, declare as output budget.
// The zero Declared is nothing at all.
type Declared struct {
	// Tokens is the largest usable number, 1 … MaxBudget, or 0 if there is none.
	Tokens fleet.Tokens
	// Seen is true when something was declared, usable or not.
	Seen bool
}

// Or joins two declarations: the larger number counts, and a number beats
// whatever is none.
func (d Declared) Or(e Declared) Declared {
	return Declared{Tokens: max(d.Tokens, e.Tokens), Seen: d.Seen || e.Seen}
}

// DeclaredNumber reads a JSON number as Envoy hands it over, a float64. A
// fraction is rounded up (the higher level, on doubt); what is not above zero
// is unusable; what is too large saturates.
func DeclaredNumber(f float64) Declared {
	switch {
	case !(f > 0): // NaN too
		return Declared{Seen: true}
	case f >= float64(MaxBudget):
		return Declared{MaxBudget, true}
	}
	return Declared{fleet.Tokens(math.Ceil(f)), true}
}

// DeclaredText reads a header's value or a JSON string: decimal numbers with an
// optional sign, fraction and exponent, surrounded by white space (Unicode's), with
// or without underscores between digits, as Python's servers take them; in a list
// with commas the largest counts. Hexadecimal, underscores elsewhere, NaN, infinity
// and digits beyond ASCII are unusable.
func DeclaredText(s []byte) Declared {
	d := Declared{Seen: true}
	for {
		part, rest, more := bytes.Cut(s, []byte{','})
		d = d.Or(declaredOne(bytes.TrimSpace(part)))
		if !more {
			return d
		}
		s = rest
	}
}

func declaredOne(s []byte) Declared {
	digits, separated := 0, false
	for _, c := range s {
		switch {
		case isDigit(c):
			digits++
		case c == '_':
			separated = true
		case c == '+' || c == '-' || c == '.' || c == 'e' || c == 'E':
		default:
			return Declared{Seen: true}
		}
	}
	if separated {
		s = joined(s)
	}
	if digits == len(s) && digits > 0 && digits <= 9 {
		n := fleet.Tokens(0)
		for _, c := range s {
			n = n*10 + fleet.Tokens(c-'0')
		}
		return Declared{min(n, MaxBudget), true}
	}
	f, err := strconv.ParseFloat(string(s), 64)
	if err != nil && !math.IsInf(f, 0) {
		return Declared{Seen: true}
	}
	return DeclaredNumber(f)
}

// joined is s without the underscores between digits, nil if one stands elsewhere.
// Python takes one at a time; pydantic 2.13 any number behind leading zeros ("0__9").
func joined(s []byte) []byte {
	out := make([]byte, 0, len(s))
	for i, c := range s {
		switch {
		case c != '_':
			out = append(out, c)
		case i == len(s)-1 || len(out) == 0 || !isDigit(out[len(out)-1]) || (s[i+1] != '_' && !isDigit(s[i+1])):
			return nil
		}
	}
	return out
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// BudgetInput is all that a budget depends on.
type BudgetInput struct {
	Header Declared
	Body   Declared
	// BodyError: there is a body and Envoy could not parse it.
	BodyError bool
	// BodyUnread: there is a body and Envoy did not look into it.
	BodyUnread bool
	// TrustDeclared believes the header alone where it has a usable number;
	// elsewhere the body counts as usual.
	TrustDeclared bool
	// Default is the route's budget for requests that declare none.
	Default fleet.Tokens
}

// declared is the largest output budget that somebody declared and that could be
// read; 0 if there is none. Budget may be more: the route's default, on doubt.
func (in *BudgetInput) declared() fleet.Tokens {
	switch {
	case in.TrustDeclared && in.Header.Tokens > 0, in.BodyError, in.BodyUnread:
		return in.Header.Tokens
	}
	return max(in.Header.Tokens, in.Body.Tokens)
}

// times is budget tokens for each of n answers; it saturates at MaxBudget, and n
// below 1 counts as 1.
func times(budget, n fleet.Tokens) fleet.Tokens {
	if n = max(n, 1); budget > MaxBudget/n {
		return MaxBudget
	}
	return budget * n
}

// Budget returns a request's output budget and where it comes from. The larger
// of header and body counts; a body that nobody could read counts as the
// route's default, never as little.
func Budget(in BudgetInput) (fleet.Tokens, BudgetSource) {
	header, body := in.Header.Tokens, in.Body.Tokens
	switch {
	case in.TrustDeclared && header > 0:
		return header, BudgetHeader
	case in.BodyError:
		return max(header, in.Default), BudgetUnreadable
	case in.BodyUnread:
		return max(header, in.Default), BudgetUnread
	case header > 0 && body > 0 && header == body:
		return body, BudgetAgreed
	case header > 0 && body > 0:
		return max(header, body), BudgetMismatch
	case header > 0:
		return header, BudgetHeader
	case body > 0:
		return body, BudgetBody
	case in.Header.Seen || in.Body.Seen:
		return in.Default, BudgetInvalid
	}
	return in.Default, BudgetDefault
}
