package admission

import (
	"math"
	"time"
)

// EndpointView is what an [EndpointLimit] goes by. A value that is not known is
// 0; its limit then does without it.
type EndpointView struct {
	// InFlight is how many attempts are in flight on the endpoint.
	InFlight int
	// Max is the configured limit, at least 1; Batch the largest batch that keeps
	// the target of the inter-token latency (see fleet.Decode).
	Max, Batch int
	// KVTokens is the KV cache's capacity; MeanTokens the mean of prompt and
	// answer together, of the requests that come.
	KVTokens, MeanTokens float64
	// Measured says that the counters below are known.
	Measured bool
	// TTFTSum, seconds, and TTFTCount are the engine's histogram of times to first
	// token, PromptTokens its counter of prompt tokens; a counter that falls has
	// begun anew. PromptTokens 0 is unknown.
	TTFTSum, TTFTCount, PromptTokens float64
	// QueueKnown says that Waiting, the engine's own queue, is known.
	QueueKnown bool
	Waiting    float64
}

// Constants of the correction. Those without a source of their own are of
// Netflix's Gradient2Limit (concurrency-limits, Gradient2Limit.java).
const (
	tolerance   = 1.5  // of the time to first token over its prediction
	steepest    = 0.5  // the smallest gradient
	extra       = 4    // requests that may queue
	smoothing   = 0.2  // weight of a new limit
	forgetRatio = 2.0  // prediction over measurement, from which …
	forget      = 0.95 // … the prediction shrinks
	kvShare     = 0.9  // of the KV cache: the rest absorbs answers above the mean

	// fixedPrompt is the work of a prefill that does not depend on the prompt, in
	// tokens. Fits of step time over prompt tokens have intercepts worth 64
	// (Llama-2-70B, 4×H100: 6.9 ms at 0.107 ms per token; Splitwise, ISCA 2024) to
	// 330 tokens (Llama-3.1-8B on one H100: 8.2 ms at 0.025 ms; LLMServingSim).
	fixedPrompt = 200

	// A correction needs many requests or some time and, since counters only move
	// when the engine is asked, never less than that takes.
	manyRequests, fewRequests = 10, 3
	shortest, longest         = 200 * time.Millisecond, 5 * time.Second
	// silence is how long no request need begin until a correction fades, and
	// fading the part of it that goes per second then: a queue that nobody joins
	// empties.
	silence = 10 * time.Second
	fading  = 0.1

	// learning is the weight of a sample without a queue in the prediction.
	learning = 0.1
	// How fast a prediction rises per second though requests take longer: slowly
	// while there may be a queue, faster while the engine says that nobody waits,
	// since then a longer time is the new normal (fewer cached prefixes, say).
	// A time that doubled is forgotten in an hour, or in six minutes.
	creep, creepIdle = 0.0002, 0.002
)

// EndpointLimit is how many attempts one endpoint should have in flight: the
// least of its configured limit, its batch and what its KV cache holds of mean
// requests, times a correction between 0 and 1.
//
// The correction is Netflix's Gradient2 on the time to first token, not on the
// whole time of a request, which is the length of its answer above all. It is
// divided by the prompt's work, (fixedPrompt + prompt tokens), as far as prompts
// are known. Gradient2 compares a short mean with a long one; under lasting
// overload the long one follows the short one and the limit grows without end.
// So the prediction here is learned from requests that met no queue: samples
// taken while the endpoint has less than half its limit in flight and the engine,
// if it tells, has no queue. A shorter time is learned at any load.
//
// The zero EndpointLimit has not seen anything yet. It is not safe for concurrent
// use.
type EndpointLimit struct {
	factor  float64 // 0 … 1; 0 is 1
	predict float64 // seconds per token of work without a queue; 0: unknown
	short   float64 // the same, lately

	begun              bool
	at                 time.Time // of the counters below
	sum, count, prompt float64
	load, waiting      float64 // means since then, of attempts in flight and of the engine's queue
	looks              float64
	last               time.Time
}

// Step takes a view and returns the limit, 1 … Max. It is called at a steady
// pace, 20 times a second or less.
func (l *EndpointLimit) Step(now time.Time, v EndpointView) int {
	ceiling := v.ceiling()
	if l.factor == 0 {
		l.factor = 1
	}
	dt := min(max(0, now.Sub(l.last)), time.Second)
	l.last = now
	if v.Measured {
		l.watch(now, &v, ceiling, dt)
	} else {
		l.begun = false
		l.fade(ceiling, dt)
	}
	return min(max(1, int(l.factor*ceiling+0.5)), max(1, v.Max))
}

// ceiling is the limit without correction.
func (v *EndpointView) ceiling() float64 {
	ceiling := max(1, v.Max)
	if v.Batch > 0 {
		ceiling = min(ceiling, v.Batch)
	}
	if v.KVTokens > 0 && v.MeanTokens > 0 {
		ceiling = min(ceiling, int(max(1, math.Floor(kvShare*v.KVTokens/v.MeanTokens))))
	}
	return float64(ceiling)
}

// watch gathers a sample and, when it is one, corrects.
func (l *EndpointLimit) watch(now time.Time, v *EndpointView, ceiling float64, dt time.Duration) {
	if !l.begun || v.TTFTCount < l.count || v.TTFTSum < l.sum || v.PromptTokens < l.prompt {
		l.restart(now, v)
		return
	}
	l.looks++
	l.load += (float64(v.InFlight) - l.load) / l.looks
	l.waiting += (v.Waiting - l.waiting) / l.looks
	n := v.TTFTCount - l.count
	switch age := now.Sub(l.at); {
	case n >= manyRequests && age >= shortest, n >= fewRequests && age >= longest:
		queue := l.queue(v.QueueKnown)
		l.learn(l.sample(v, n), age, queue, ceiling)
		l.correct(queue, ceiling)
		l.restart(now, v)
	case age > silence && n == 0:
		l.fade(ceiling, dt)
	case age > silence:
		l.restart(now, v) // too few to tell
	}
}

func (l *EndpointLimit) restart(now time.Time, v *EndpointView) {
	l.begun, l.at = true, now
	l.sum, l.count, l.prompt = v.TTFTSum, v.TTFTCount, v.PromptTokens
	l.load, l.waiting, l.looks = 0, 0, 0
}

// sample is the mean time to first token per token of work since the last one.
func (l *EndpointLimit) sample(v *EndpointView, n float64) float64 {
	work := 1.0
	if v.PromptTokens > 0 {
		work = fixedPrompt + (v.PromptTokens-l.prompt)/n
	}
	return (v.TTFTSum - l.sum) / n / work
}

// queue is what the engine tells of its queue.
type queue uint8

const (
	queueUnknown queue = iota
	queueEmpty
	queueLong
)

// queue judges the engine's queue since the last sample. A few always wait for
// the next step of the engine.
func (l *EndpointLimit) queue(known bool) queue {
	switch {
	case !known:
		return queueUnknown
	case l.waiting > 1+0.02*l.load:
		return queueLong
	}
	return queueEmpty
}

// learn takes a sample into the means.
func (l *EndpointLimit) learn(sample float64, age time.Duration, q queue, ceiling float64) {
	if sample <= 0 {
		return
	}
	if l.short == 0 {
		l.short = sample
	}
	l.short += smoothing * (sample - l.short)
	free := q != queueLong && l.load < l.factor*ceiling/2
	switch {
	case l.predict == 0 && q == queueLong:
		return // nothing is known yet of a time without a queue
	case l.predict == 0:
		l.predict = sample
	case free || l.short < l.predict:
		l.predict += learning * (l.short - l.predict)
	case q == queueEmpty:
		l.predict = min(l.short, l.predict*math.Pow(1+creepIdle, age.Seconds()))
	default:
		l.predict = min(l.short, l.predict*math.Pow(1+creep, age.Seconds()))
	}
	if l.predict/l.short > forgetRatio {
		l.predict *= forget
	}
}

// correct moves the limit by the gradient, unless the endpoint does not come near
// it: then times say nothing of it. A queue that was there from the first is
// reason enough.
func (l *EndpointLimit) correct(q queue, ceiling float64) {
	limit := l.factor * ceiling
	if l.short == 0 || l.load < limit/2 {
		return
	}
	gradient := steepest
	if l.predict > 0 {
		gradient = min(max(tolerance*l.predict/l.short, steepest), 1)
	} else if q != queueLong {
		return
	}
	limit += smoothing * (limit*gradient + extra - limit)
	l.factor = min(max(limit/ceiling, 1/ceiling), 1)
}

// fade lets a correction go.
func (l *EndpointLimit) fade(ceiling float64, dt time.Duration) {
	l.factor = min(1, l.factor+max(fading, 1/ceiling)*dt.Seconds())
}
