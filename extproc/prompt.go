package extproc

import "github.com/fairlead-proxy/fairlead/fleet"

const (
	// bytesPerToken turns a body's length into prompt tokens: one token is about
	// four characters of English text (OpenAI's tokenizer page). JSON's own
	// characters count as text, so short prompts are overrated by some ten
	// tokens; code and most other languages have fewer bytes per token; an image
	// inside the body is overrated many times over. So the estimate only prefers
	// endpoints, see plan.Class.
	bytesPerToken = 4
	// maxPrompt is where estimates saturate: a million tokens, the longest
	// context that servers are run with.
	maxPrompt fleet.Tokens = 1 << 20
)

// promptTokens estimates a prompt's length from the body's; 0 stands for
// unknown in both.
func promptTokens(bodyBytes int64) fleet.Tokens {
	return min(fleet.Tokens(bodyBytes/bytesPerToken), maxPrompt)
}

// maxLengthDigits keeps a content-length inside 64 bits.
const maxLengthDigits = 18

// contentLength reads a content-length header: digits and nothing else. It is 0
// when there is none that can be read.
func contentLength(value []byte) int64 {
	if len(value) > maxLengthDigits {
		return 0
	}
	n := int64(0)
	for _, c := range value {
		if c < '0' || c > '9' {
			return 0
		}
		n = n*10 + int64(c-'0')
	}
	return n
}
