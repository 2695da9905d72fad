package load

import "math/rand/v2"

// Lengths is a joint distribution of prompt and output lengths in tokens, both
// drawn independently.
type Lengths struct {
	prompt, output []quantile
}

// quantile is a point of a distribution: the share p of the values is at most
// value. Between points it is linear.
type quantile struct {
	p     float64 // 0 … 1, rising
	value float64
}

// AzureConversation has the lengths of chat requests in a large service: points
// of the Azure LLM inference trace 2023, "conv" (19,366 requests in 58 minutes;
// github.com/Azure/AzurePublicDataset, CC-BY-4.0; Patel et al., "Splitwise",
// ISCA 2024). Prompts have 1,020 / 2,735 / 4,142 tokens and outputs 129 / 424 /
// 601 at p50 / p90 / p99, with means of about 1,155 and 211. In the trace the two
// are all but independent (rank correlation 0.07).
func AzureConversation() Lengths {
	return Lengths{
		prompt: []quantile{
			{0, 1}, {0.01, 29}, {0.05, 181}, {0.1, 207}, {0.2, 387}, {0.25, 396}, {0.3, 403},
			{0.4, 703}, {0.5, 1020}, {0.6, 1071}, {0.7, 1130}, {0.75, 1189}, {0.8, 1315},
			{0.9, 2735}, {0.95, 4083}, {0.98, 4098}, {0.99, 4142}, {0.995, 4831}, {0.999, 6212}, {1, 14050},
		},
		output: []quantile{
			{0, 7}, {0.01, 16}, {0.05, 41}, {0.1, 54}, {0.2, 77}, {0.25, 85}, {0.3, 91},
			{0.4, 103}, {0.5, 129}, {0.6, 177}, {0.7, 384}, {0.75, 395}, {0.8, 400},
			{0.9, 424}, {0.95, 451}, {0.98, 540}, {0.99, 601}, {0.995, 644}, {0.999, 954}, {1, 1000},
		},
	}
}

// FixedLengths gives every request the same lengths; both are at least 1.
func FixedLengths(prompt, output int) Lengths {
	fixed := func(n int) []quantile { return []quantile{{0, float64(max(n, 1))}, {1, float64(max(n, 1))}} }
	return Lengths{prompt: fixed(prompt), output: fixed(output)}
}

// Draw returns the lengths that belong to a seed, each at least 1.
func (l Lengths) Draw(seed uint64) (prompt, output int) {
	rng := rand.New(rand.NewPCG(seed, 0x6c656e67746873))
	return at(l.prompt, rng.Float64()), at(l.output, rng.Float64())
}

// at inverts the distribution at p.
func at(points []quantile, p float64) int {
	for i := 1; i < len(points); i++ {
		a, b := points[i-1], points[i]
		if p <= b.p {
			return max(1, int(a.value+(b.value-a.value)*(p-a.p)/(b.p-a.p)+0.5))
		}
	}
	return 1
}
