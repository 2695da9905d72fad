package fleet

import "strings"

// GeneratingPaths are the path endings that make a model generate tokens.
// Requests to any other path (/v1/models, /v1/files, …) are passed: never
// shed, and retried only where nothing was sent.
var generatingPaths = []string{"/chat/completions", "/completions", "/messages", "/responses"}

// GeneratingPaths returns the path endings of [Generates].
func GeneratingPaths() []string { return append([]string(nil), generatingPaths...) }

// Generates reports whether a request's :path (a query is ignored) asks a
// model to generate tokens.
func Generates(path string) bool {
	path, _, _ = strings.Cut(path, "?")
	for _, end := range generatingPaths {
		if strings.HasSuffix(path, end) {
			return true
		}
	}
	return false
}
