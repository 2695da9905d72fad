package extproc

import (
	"math"
	"strconv"
	"strings"
)

// Sampling is what the temperature and top_k headers declare. It is validated
// and recorded, nothing else: no decision depends on it.
type Sampling struct {
	Temperature    float64 // 0 … 2, if HasTemperature
	TopK           int32   // −1 (all tokens) … 2³¹−1, if HasTopK
	HasTemperature bool
	HasTopK        bool
	// Invalid: a header was there whose value is none of that.
	Invalid bool
}

// maxTemperature is the largest temperature that OpenAI's API accepts.
const maxTemperature = 2

func (s *Sampling) temperature(value []byte) {
	f, err := strconv.ParseFloat(strings.TrimSpace(string(value)), 64)
	if err != nil || math.IsNaN(f) || f < 0 || f > maxTemperature {
		s.Invalid = true
		return
	}
	s.Temperature, s.HasTemperature = f, true
}

func (s *Sampling) topK(value []byte) {
	n, err := strconv.ParseInt(strings.TrimSpace(string(value)), 10, 32)
	if err != nil || n < -1 {
		s.Invalid = true
		return
	}
	s.TopK, s.HasTopK = int32(n), true
}
