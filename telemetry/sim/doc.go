// Package sim owns simulated model servers: real HTTP servers that answer the
// OpenAI and Anthropic APIs at the pace of a GPU inference engine.
//
// Each [Server] drives an [engine.Engine] in real time: its steps last what the
// profile, fitted to published measurements, says. Beside
// the API a server offers the pages that real ones are watched by: /metrics
// with vLLM's names and /gpu/metrics as dcgm-exporter writes it. Faults can be
// injected by schedule or at run time ([Fault]).
//
// A prompt's tokens are estimated as a quarter of its text's bytes. An answer
// ends by itself after a length drawn from the seed and the request's bytes, or
// earlier at the client's limit; with "ignore_eos": true it is as long as that
// limit. Both lengths can be set by an extra member of the body:
//
//	"fairlead_sim": {"prompt_tokens": 1020, "output_tokens": 129}
//
// A stream sends its headers when the request is accepted, an event with the
// first token, and one for every TokensPerEvent after it.
//
// A server over several GPUs shows one of them on its GPU page: they work in
// step.
//
// The package never decides where a request goes, never looks at a Fairlead
// config, and keeps no text: a token is a word from a fixed list.
//
// Invariants: with the same seed a request has the same lengths on whatever server it
// lands; GPU memory in use is flat from start to stop, as with every server
// that allocates its KV cache in advance.
package sim
