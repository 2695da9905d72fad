package ratelimit

import (
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// TestServersThatEvictAreNamed: by a line each time that they are found anew, where they may
// be asked.
func TestServersThatEvictAreNamed(t *testing.T) {
	for _, row := range []struct {
		lines []string
		warns bool
	}{
		{nil, false},
		{[]string{"maxmemory-policy noeviction"}, false},
		{[]string{"maxmemory-policy allkeys-lru"}, true},
		{[]string{"maxmemory-policy volatile-ttl"}, true},
		{[]string{"maxmemory-policy allkeys-lru", `rename-command INFO ""`}, false},
	} {
		s := redisbin.Start(t, redisbin.Config{Lines: row.lines})
		m := replicas(t, fleet.Redis{Address: "unix:" + s.Socket, OnError: fleet.OnErrorLocal}, 1)[0]
		up(t, m)
		eventually(t, "a line", func() bool {
			return m.log.count("redis counts the limits") == 1 && (!row.warns || m.log.count("redis may evict") == 1)
		})
		if got := m.log.count("redis may evict"); (got == 1) != row.warns || got > 1 {
			t.Errorf("%q: %d warnings:\n%s", row.lines, got, m.log.String())
		}
		if policy := strings.TrimPrefix(strings.Join(row.lines, ""), "maxmemory-policy "); row.warns && m.log.count("policy="+policy) != 1 {
			t.Errorf("%q isn't named:\n%s", policy, m.log.String())
		}
	}
}
