package load

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

// TestSimulatedServersCountTheSameTokens sends a load in both dialects to a
// simulated model server: it prefills the scheduled prompts and generates the
// scheduled outputs, and the callers see as many tokens.
func TestSimulatedServersCountTheSameTokens(t *testing.T) {
	profile, err := sim.ProfileByName("llama-3.1-8b-h100")
	if err != nil {
		t.Fatal(err)
	}
	servers, err := sim.New(&sim.Config{Servers: []sim.ServerConfig{{
		Name: "one", Listen: netip.MustParseAddrPort("127.0.0.1:0"), Model: "m", Engine: profile, TokensPerEvent: 4,
	}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := servers.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- servers.Run(ctx) }()
	server := servers.Servers()[0]

	var prompts, outputs uint64
	for seed, dialect := range []fleet.Dialect{fleet.DialectOpenAI, fleet.DialectAnthropic} {
		arrivals := Schedule(uint64(seed), 200, 100*time.Millisecond, Poisson, AzureConversation(), 0.5)
		for i := range arrivals {
			arrivals[i].Output = 1 + arrivals[i].Output/8
			prompts += uint64(arrivals[i].Prompt)
			outputs += uint64(arrivals[i].Output)
		}
		for _, r := range run(t, arrivals, Options{Targets: []string{"http://" + server.Addr().String()}, Dialect: dialect, Model: "m", Timeout: time.Minute}) {
			if r.Failed() || r.FirstToken == 0 {
				t.Fatalf("%v: request %d: %d %q", dialect, r.Index, r.Status, r.Err)
			}
			// OpenAI's streams report usage only when asked.
			if exact := r.Whole || dialect == fleet.DialectAnthropic; exact && r.Tokens != r.Output {
				t.Errorf("%v: request %d: %d tokens, want %d", dialect, r.Index, r.Tokens, r.Output)
			}
		}
	}
	if s := server.Stats(); s.PromptTokens != prompts || s.GeneratedTokens != outputs {
		t.Errorf("the server counted %d and %d tokens, want %d and %d", s.PromptTokens, s.GeneratedTokens, prompts, outputs)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
