package fleet

import "strings"

// generatingPaths are the path endings that make a model generate tokens: those of
// the APIs of OpenAI (/completions stands for /chat/completions too; /realtime is
// that of the Realtime API, which speaks over a WebSocket) and Anthropic, and those
// that model servers have beside them: /generate of SGLang, TGI and Ollama, TGI's
// /generate_stream, /invocations of SageMaker's contract, which vLLM and TGI serve
// too, and Ollama's /api/chat.
// Requests to any other path (/v1/models, /v1/embeddings, …) are passed: never
// limited nor shed, and retried only where nothing was sent.
//
// Envoy refuses a regular expression of more than 100 instructions
// (re2.max_program_size.error_level); the one that is made of these is close to it.
var generatingPaths = []string{
	"/completions", "/messages", "/responses", "/realtime",
	"/generate", "/generate_stream", "/invocations", "/api/chat",
}

// GeneratingPaths returns the path endings of [Generates].
func GeneratingPaths() []string { return append([]string(nil), generatingPaths...) }

// pathEnds are what may follow a generating path's ending without making it
// another path to servers: a slash, which they redirect or ignore, and an
// escaped newline, before which the $ of a Python pattern matches too (the
// routers of FastAPI and Starlette end their patterns with it).
var pathEnds = []string{"/", "%0a", "%0A"}

// GeneratingPathEnds returns what may follow a path's ending, any number of
// times.
func GeneratingPathEnds() []string { return append([]string(nil), pathEnds...) }

// Generates reports whether a request's :path (a query is ignored) asks a
// model to generate tokens. The path must be normalised as Envoy's listeners
// do: without dot segments, doubled slashes and needless escapes.
func Generates(path string) bool {
	path, _, _ = strings.Cut(path, "?")
	path = trimEnds(path)
	for _, end := range generatingPaths {
		if strings.HasSuffix(path, end) {
			return true
		}
	}
	return false
}

func trimEnds(path string) string {
	for {
		before := path
		for _, end := range pathEnds {
			path = strings.TrimSuffix(path, end)
		}
		if path == before {
			return path
		}
	}
}
