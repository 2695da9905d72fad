package ratelimit

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/redis/rueidis"
)

// warnOfEviction says in the log that servers may evict what limits are counted in, as
// far as they tell: a count that is gone while ledgers stay makes room (ADR 0012). A user
// that may not ask for INFO learns nothing.
func (m *Redis) warnOfEviction(ctx context.Context, l *link) {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	nodes := l.client.Nodes()
	for _, address := range slices.Sorted(maps.Keys(nodes)) {
		if policy := evictionPolicy(ctx, nodes[address]); policy != "" && policy != noEviction {
			m.log.Warn("redis may evict what limits are counted in; set maxmemory-policy to "+noEviction, "address", address, "policy", policy)
		}
	}
}

const noEviction = "noeviction"

// evictionPolicy is a server's maxmemory-policy, "" if it doesn't tell.
func evictionPolicy(ctx context.Context, server rueidis.Client) string {
	info, err := server.Do(ctx, server.B().Info().Section("memory").Build()).ToString()
	if err != nil {
		return ""
	}
	for line := range strings.Lines(info) {
		if policy, found := strings.CutPrefix(line, "maxmemory_policy:"); found {
			return strings.TrimSpace(policy)
		}
	}
	return ""
}
