package fleet

import "strings"

// generatingPaths are the path endings that make a model generate tokens: those of
// the APIs of OpenAI (/completions stands for /chat/completions too; /realtime is
// that of the Realtime API, which speaks over a WebSocket) and Anthropic, and those
// that model servers have beside them: vLLM's /chat/completions/batch, /generate of
// SGLang, TGI and Ollama (generate: SGLang's /vertex_generate too), TGI's
// /generate_stream, /invocations of SageMaker's contract, which vLLM and TGI serve
// too, /api/chat of Ollama and /v2/chat of Cohere, /completion and /infill of
// llama.cpp. TGI also generates on /.
// Requests to any other path (/v1/models, /v1/embeddings, …) are passed: never
// limited nor shed, and retried only where nothing was sent; but see
// [Route.Generates].
var generatingPaths = []string{
	"/completions", "/completions/batch", "/messages", "/responses", "/realtime",
	"generate", "/generate_stream", "/invocations", "/chat", "/completion", "/infill",
}

// GeneratingPaths returns the path endings of [Generates], but for the empty path.
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
	if path = trimEnds(path); path == "" {
		return true
	}
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
