package admission

import (
	"math"
	"sync/atomic"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// lengths are the bytes and the output tokens that answers have had together, the old ones
// fading: their ratio is a mean over tokens, in which an answer weighs by its length. In a
// mean over answers those of one token, which are nearly all frame, made tokens look long,
// and what breaks off cheap: after 200 answers of 1,000 tokens and 50 of one, a stream that
// broke off after 1,000 was taken for 327, a whole answer for 13.
//
// Both sums are one word, as the bits of a float32 each (bytes in the upper half), so that
// they are read and written together without a lock. It may be used in parallel: of two
// answers that are added at the same moment one may be lost, which is no loss.
type lengths struct{ sums atomic.Uint64 }

const (
	// outputMemory is the number of tokens after which an answer counts for 1/e: a
	// hundred of 1,000. A choice: there are fewer than of prompts (500,000).
	outputMemory = 100_000
	// mostOutput is what one answer counts for at most, in tokens: a fiftieth of that.
	mostOutput = outputMemory / 50
	// fewestOutput is the shortest answer that teaches, in tokens. What is around an
	// answer's text, some 500 bytes of JSON or the first and last events of a stream, is
	// four fifths of a whole one of 32 tokens and a tenth of a stream; shorter ones tell of
	// little else. With more, routes of short answers would never learn.
	fewestOutput = 32
)

// add takes in an answer that ended well; one of less than fewestOutput tokens changes
// nothing.
func (l *lengths) add(bytes int64, output fleet.Tokens) {
	if output < fewestOutput || bytes <= 0 {
		return
	}
	tokens := float64(min(output, mostOutput))
	kept := 1 - tokens/outputMemory
	oldBytes, oldTokens := l.load()
	l.store(kept*oldBytes+tokens*float64(bytes)/float64(output), kept*oldTokens+tokens)
}

// ratio is bytes per output token, 0 before the first answer.
func (l *lengths) ratio() float64 {
	bytes, tokens := l.load()
	if tokens == 0 {
		return 0
	}
	return bytes / tokens
}

func (l *lengths) load() (bytes, tokens float64) {
	sums := l.sums.Load()
	return float64(math.Float32frombits(uint32(sums >> 32))), float64(math.Float32frombits(uint32(sums)))
}

func (l *lengths) store(bytes, tokens float64) {
	l.sums.Store(uint64(math.Float32bits(float32(bytes)))<<32 | uint64(math.Float32bits(float32(tokens))))
}
