package ratelimit

import (
	"sync/atomic"
	"time"
)

// A counter's word is a window's number, 24 bits, above what is used, 40 bits:
// more than the largest amount a config may name (10^12). Counting what is used
// rather than what is left lets a limit change within a window.
const (
	usedBits  = 40
	maxUsed   = 1<<usedBits - 1
	maxOffset = 1<<(64-usedBits) - 1
)

// counter counts one kind of thing in one window, by compare-and-swap. The zero
// counter is at the window number 0 and has nothing used.
type counter struct {
	// first is the number that offset 0 stands for; it never changes, so that
	// numbers don't wrap: the table replaces a counter that is outgrown (194 days
	// old with windows of a second, 31 years with minutes).
	first int64
	word  atomic.Uint64
}

// outgrown says whether the window n is beyond the word's range.
func (c *counter) outgrown(n int64) bool { return n-c.first > maxOffset }

// window returns the number of the latest window that was counted in.
func (c *counter) window() int64 { return c.first + int64(c.word.Load()>>usedBits) }

// read returns the window that counts at n, which is a later one when the clock
// went back, what is used of it, and the word it was read from.
func (c *counter) read(n int64) (window, used int64, word uint64) {
	word = c.word.Load()
	window = c.first + int64(word>>usedBits)
	if n > window {
		return n, 0, word
	}
	return window, int64(word & maxUsed), word
}

func (c *counter) pack(window, used int64) uint64 {
	return uint64(window-c.first)<<usedBits | uint64(min(max(used, 0), maxUsed))
}

// take uses cost of the window n, or nothing where that would exceed the limit.
// It returns the window that counted and what is used of it now.
func (c *counter) take(n, cost, limit int64) (window, used int64, ok bool) {
	for {
		window, used, word := c.read(n)
		if cost > limit-used {
			return window, used, false
		}
		if c.word.CompareAndSwap(word, c.pack(window, used+cost)) {
			return window, used + cost, true
		}
	}
}

// add corrects what is used of the window n, if that is the one that counts.
func (c *counter) add(n, delta int64) {
	for {
		word := c.word.Load()
		if c.first+int64(word>>usedBits) != n {
			return
		}
		if c.word.CompareAndSwap(word, c.pack(n, int64(word&maxUsed)+delta)) {
			return
		}
	}
}

// note adds to what is used of the window n, whatever the limit; of a window
// that is over it notes nothing.
func (c *counter) note(n, cost int64) {
	for {
		window, used, word := c.read(n)
		if window != n || c.word.CompareAndSwap(word, c.pack(n, used+cost)) {
			return
		}
	}
}

// raise makes what is used of the window n at least used.
func (c *counter) raise(n, used int64) {
	for {
		window, now, word := c.read(n)
		if window != n || n == c.first+int64(word>>usedBits) && now >= used {
			return
		}
		if c.word.CompareAndSwap(word, c.pack(n, used)) {
			return
		}
	}
}

// set makes what is used of the window n exactly used.
func (c *counter) set(n, used int64) {
	for {
		window, _, word := c.read(n)
		if window != n || c.word.CompareAndSwap(word, c.pack(n, used)) {
			return
		}
	}
}

// last returns the counter's window and what is used of it.
func (c *counter) last() (window, used int64) {
	window, used, _ = c.read(c.first)
	return window, used
}

// renew takes over what an outgrown counter has used, if that still counts in the
// window n. Nobody else may use the two.
func (c *counter) renew(from *counter, n int64) {
	if window, used := from.last(); window >= n {
		c.first = window
		c.word.Store(uint64(used))
	}
}

// number of the window that holds a time in ns since the Unix epoch.
func number(at int64, window time.Duration) int64 { return at / int64(window) }
