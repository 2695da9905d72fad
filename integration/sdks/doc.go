// Package sdks lets the official Go clients of OpenAI and Anthropic, unmodified
// and with their defaults, talk to a real Envoy that `fairlead serve` configures
// and answers for. It is a module of its own, because those clients take long to
// compile; the root module's integration tests execute it.
//
// It is the one place where a test looks at a clock: a client must wait as long
// as it was told, not less, and not much more.
package sdks
