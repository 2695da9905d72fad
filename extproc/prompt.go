package extproc

import (
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// maxPrompt is where estimates saturate: a million tokens, the longest context
// that servers are run with.
const maxPrompt fleet.Tokens = 1 << 20

// longestToken is more bytes than tokens of long texts have on average, in any
// language and with any tokenizer in use. English has 4.4 characters a token, others
// have fewer (o200k_base; the vocabularies that are made for one language come close
// to it); six are more than that. A character has up to six bytes: many clients send
// all that is not ASCII as its escape, \u0431, as json.dumps of Python does. Words of
// six such letters and a space have 37 bytes in seven characters, so six characters
// have 32.
const longestToken = 32

// promptTokens estimates a prompt's length from the body's and from the route's
// ratio, plan.RouteInfo.BytesPerToken; 0 stands for unknown in both lengths.
// JSON's own characters count as text, so short prompts are overrated by some
// ten tokens; an image inside the body is overrated many times over. So the
// estimate only prefers endpoints (see plan.Class), is what a limit on tokens reserves
// until usage is known, and on routes that want it refuses who may come back.
func promptTokens(bodyBytes int64, bytesPerToken float64) fleet.Tokens {
	if !(bytesPerToken > 0) {
		bytesPerToken = plan.DefaultBytesPerToken
	}
	return fleet.Tokens(min(float64(bodyBytes)/bytesPerToken, float64(maxPrompt)))
}

// contentLength reads a content-length header: digits and nothing else. It is 0
// when there is none that can be read.
func contentLength(value []byte) int64 {
	n, _ := digits(value)
	return int64(n)
}
