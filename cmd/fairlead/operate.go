package main

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/scorer"
)

// reader holds the flags every command has that asks a running serve.
type reader struct {
	admin, file, format string
}

func (r *reader) register(flags *flag.FlagSet) {
	flags.StringVar(&r.admin, "admin", "", "the admin `address` of serve; default: serve.admin of the config file")
	flags.StringVar(&r.file, "f", "fairlead.yaml", "the config `file` of serve, read for its admin address")
	flags.StringVar(&r.format, "o", "table", "output `format`: table or json")
}

func (r *reader) client() (*admin.Client, error) {
	if r.format != "table" && r.format != "json" {
		return nil, usageError{fmt.Errorf("-o %q; accepted: table, json", r.format)}
	}
	if r.admin != "" {
		return admin.NewClient(strings.TrimPrefix(strings.TrimSuffix(r.admin, "/"), "http://")), nil
	}
	cfg, err := fleet.Load(r.file)
	if err == nil {
		return admin.NewClient(cfg.Serve.Admin.Target()), nil
	}
	// serve may well be running on the last good config: all that is needed
	// here is where.
	if address := adminAddress(r.file); address != "" {
		return admin.NewClient(address), nil
	}
	return nil, fmt.Errorf("%w\n(only serve.admin was wanted from the file: --admin IP:PORT does without it)", err)
}

// adminAddress reads serve.admin out of a file that may have faults elsewhere;
// "" if even that can't be had.
func adminAddress(file string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	var cfg struct {
		Serve struct{ Admin string }
	}
	if err := yaml.Unmarshal(text, &cfg); err != nil {
		return ""
	}
	if a, err := fleet.ParseAddress(cfg.Serve.Admin); err != nil || a.Network() != "tcp" {
		return ""
	}
	return cfg.Serve.Admin
}

// show prints v as JSON or as the table that rows writes.
func show(w io.Writer, format string, v any, header string, rows func(io.Writer)) error {
	if format == "json" {
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(v)
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, header)
	rows(table)
	return table.Flush()
}

// ask is a command that asks a running serve for something and shows it.
func ask[T any](ctx context.Context, args []string, std stdio, name, about string, get func(*admin.Client, context.Context) (T, error), show func(io.Writer, string, T) error) error {
	var r reader
	flags := newFlags(name, "", about, std)
	r.register(flags)
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	client, err := r.client()
	if err != nil {
		return err
	}
	answer, err := get(client, ctx)
	if err != nil {
		return err
	}
	return show(std.out, r.format, answer)
}

func runProxyStatus(ctx context.Context, args []string, io stdio) error {
	return ask(ctx, args, io, "proxy-status", "Shows, per sidecar and resource type: SYNCED, STALE or NACKED with the reason.",
		(*admin.Client).Proxies, showProxies)
}

func runFleet(ctx context.Context, args []string, io stdio) error {
	return ask(ctx, args, io, "fleet", "Shows every endpoint with risk, state, share of new requests and requests in flight.",
		(*admin.Client).Fleet, showFleet)
}

func runPools(ctx context.Context, args []string, io stdio) error {
	return ask(ctx, args, io, "pools", "Shows what every pool can hold, what it holds, and its burst levels by output budget.\n"+
		"SHARE is how many requests an interactive client of weight 1 may have in flight while the pool\n"+
		"is full (- while it is not); a batch client may have a quarter of that, either times its weight.",
		(*admin.Client).Fleet, showPools)
}

// levelNames are the budgets of the burst levels, in tokens.
var levelNames = [fleet.BurstLevels]string{"<10", "<64", "<128", "<256", "<512", "<1024", "<=2048", ">2048"}

func showPools(w io.Writer, format string, f admin.Fleet) error {
	return show(w, format, f.Pools, "POOL\tLIMIT\tCLIENTS\tSHARE\tLEVEL\tIN FLIGHT\tBUDGET\tQUEUE\t", func(w io.Writer) {
		for _, p := range f.Pools {
			for i, l := range p.Levels {
				head := "\t\t\t"
				if i == 0 {
					head = fmt.Sprintf("%s\t%.0f\t%d\t%s", p.Name, p.Limit, p.Clients, known(p.Share, 1))
				}
				name, mark := strconv.Itoa(l.Level), ""
				if l.Level < len(levelNames) {
					name = levelNames[l.Level]
				}
				if l.Backlogged {
					mark = "backlogged"
				}
				fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%s\n", head, name, l.InFlight, known(l.Budget, 0), seconds(l.QueueMillis/1000), mark)
			}
		}
	})
}

func runClients(ctx context.Context, args []string, io stdio) error {
	return ask(ctx, args, io, "clients", "Shows which clients have most requests of every pool in flight and waiting, by the hash of what they are told apart by.\n"+
		"EARLY is how many came back of late before they were told to. It sees only callers that count their tries in\n"+
		"x-stainless-retry-count, as the official SDKs do; of others it is 0, and a return looks like a further request:\n"+
		"look at WAITING, in which each of their refusals stays until its slot has passed. AWAY is for how long a client is\n"+
		"kept out of the pool yet, since a server there answered it alone with a 429; where clients are told apart by something\n"+
		"else than credentials, it is one of these, in a row without a class. Refusals are counted by route and class\n"+
		"(fairlead_admission_requests_total) and by limit (fairlead_limit_requests_total), not by client.",
		(*admin.Client).Clients, showClients)
}

func showClients(w io.Writer, format string, clients []admin.Caller) error {
	if format == "table" && len(clients) == 0 {
		_, err := fmt.Fprintln(w, "No client has requests in flight or waiting, or is kept out of a pool.")
		return err
	}
	return show(w, format, clients, "POOL\tCLIENT\tCLASS\tIN FLIGHT\tSHARE\tWAITING\tEARLY\tAWAY", func(w io.Writer) {
		for _, c := range clients {
			class, away := "-", "-"
			if c.Class != "" {
				class = c.Class
			}
			if c.Away > 0 {
				away = seconds(c.Away)
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%d\t%.0f\t%s\n", c.Pool, c.Client, class, c.InFlight, known(c.Share, 1), c.Waiting, c.Early, away)
		}
	})
}

func runNodes(ctx context.Context, args []string, io stdio) error {
	return ask(ctx, args, io, "nodes", "Shows every machine: whether it is ready, what its agent last said, and its GPUs.",
		(*admin.Client).Fleet, showNodes)
}

func showNodes(w io.Writer, format string, f admin.Fleet) error {
	return show(w, format, f.Nodes, "NODE\tREADY\tAGENT\tFRAME AGE\tDROPPED\tREFUSED\tREJECTED\tGPU\tMODEL\tCONDITION\tXID\tWHY", func(w io.Writer) {
		for _, n := range f.Nodes {
			ready := "no"
			if n.Ready {
				ready = "yes"
			}
			if n.Agent == nil {
				fmt.Fprintf(w, "%s\t%s\t-\t-\t-\t-\t-\t-\t\t\t\t%s\n", n.Name, ready, n.Why)
				continue
			}
			a, why := n.Agent, n.Why
			if a.Error != "" {
				why = strings.TrimPrefix(why+": "+a.Error, ": ")
			}
			agent := "away"
			if a.Connected {
				agent = "connected"
			}
			head := fmt.Sprintf("%s\t%s\t%s\t%s\t%d\t%d\t%d", n.Name, ready, agent, seconds(a.FrameAge), a.Dropped, a.Refused, a.Rejected)
			if len(a.GPUs) == 0 {
				fmt.Fprintf(w, "%s\t-\t\t\t\t%s\n", head, why)
			}
			for _, g := range a.GPUs {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\n", head, g.ID, strings.TrimSpace(g.Model+" "+g.Profile), g.Condition, g.XID, why)
			}
		}
	})
}

func showProxies(w io.Writer, format string, proxies []admin.Proxy) error {
	return show(w, format, proxies, "NODE\tGROUP\tLISTEN\tCONNECTED\tTYPE\tSTATE\tREASON", func(w io.Writer) {
		for _, p := range proxies {
			connected := "yes"
			if !p.Connected {
				connected = "left " + p.LastSeen.Format(time.TimeOnly)
			}
			for _, t := range p.Types {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", p.Node, p.Group, p.Listen, connected, t.Type, t.State, cmp.Or(p.Reason, t.Reason))
			}
			if len(p.Types) == 0 {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t-\t-\t%s\n", p.Node, p.Group, p.Listen, connected, p.Reason)
			}
		}
	})
}

func showFleet(w io.Writer, format string, f admin.Fleet) error {
	return show(w, format, f, "POOL\tENDPOINT\tADDRESS\tRISK\tSTATE\tSHARE\tIN FLIGHT\tERRORS\tHEADERS\tKV\tRUNNING\tWAITING\tAGE\tGPU\tWHY", func(w io.Writer) {
		for _, p := range f.Pools {
			for _, e := range p.Endpoints {
				risk := "-"
				if e.Known {
					risk = strconv.FormatFloat(e.Risk, 'f', 2, 64)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%.1f %%\t%d/%d\t%d/%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", p.Name, e.Name, e.Address, risk,
					e.State, 100*e.Share, e.InFlight, e.Limit, e.Errors5s, e.Attempts5s, seconds(e.HeaderMillis/1000), known(e.KVUsage, 2), known(e.Running, 0), known(e.Waiting, 0), seconds(e.TelemetryAge), gpuWord(e), why(e))
			}
		}
	})
}

// known is a number with so many decimals, or "-" for one that is not known.
func known(v float64, decimals int) string {
	if v < 0 {
		return "-"
	}
	return strconv.FormatFloat(v, 'f', decimals, 64)
}

// gpuWord is what is known of the endpoint's GPUs in a word, with the last XID.
func gpuWord(e admin.Endpoint) string {
	word := e.Condition
	if word == "" || word == "unknown" {
		word = "-"
	}
	if e.XID != 0 {
		word += fmt.Sprintf(" (XID %d)", e.XID)
	}
	return word
}

// why joins what the state rests on with what is wrong with the telemetry.
func why(e admin.Endpoint) string {
	var words []string
	if e.Why != scorer.ReasonNone.String() || !e.Closed && !e.Failing {
		words = append(words, e.Why)
	}
	if e.Closed {
		words = append(words, "closed "+briefly(e.ClosedFor))
	}
	if e.Failing {
		words = append(words, "failing")
	}
	word := strings.Join(words, ", ")
	if e.TelemetryError == "" {
		return word
	}
	return word + ": " + e.TelemetryError
}

// briefly is a time in whole seconds, or tenths of one below two.
func briefly(s float64) string {
	unit := time.Second
	if s < 2 {
		unit = time.Second / 10
	}
	return time.Duration(s * float64(time.Second)).Round(unit).String()
}

func seconds(s float64) string {
	if s < 0 {
		return "-"
	}
	return time.Duration(s * float64(time.Second)).Round(time.Millisecond).String()
}

const rolloutUsage = ` …

  rollout get                          show the splits of all routes
  rollout set ROUTE POOL=WEIGHT…       set weights by hand; they are shares of their sum,
                                       no percentages, and pools left out keep theirs
  rollout clear ROUTE                  go back to the config file's split`

func runRollout(ctx context.Context, args []string, io stdio) error {
	var r reader
	flags := newFlags("rollout", rolloutUsage, "Weights set by hand are kept over a restart and end when the file's own split of that route changes.", io)
	r.register(flags)
	words, err := parseAnywhere(flags, args)
	if err != nil {
		return err
	}
	if len(words) == 0 {
		words = []string{"get"}
	}
	do, err := rolloutCall(words)
	if err != nil {
		return usageError{fmt.Errorf("fairlead rollout: %w", err)}
	}
	client, err := r.client()
	if err != nil {
		return err
	}
	splits, err := do(ctx, client)
	if err != nil {
		return err
	}
	return showSplits(io.out, r.format, splits)
}

// rolloutCall turns the words after `rollout` into the call they ask for.
func rolloutCall(words []string) (func(context.Context, *admin.Client) ([]admin.Split, error), error) {
	switch verb, rest := words[0], words[1:]; {
	case verb == "get" && len(rest) == 0:
		return func(ctx context.Context, c *admin.Client) ([]admin.Split, error) { return c.Splits(ctx) }, nil
	case verb == "clear" && len(rest) == 1:
		return func(ctx context.Context, c *admin.Client) ([]admin.Split, error) { return c.ClearSplit(ctx, rest[0]) }, nil
	case verb == "set" && len(rest) >= 2:
		weights, err := parseWeights(rest[1:])
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context, c *admin.Client) ([]admin.Split, error) {
			return c.SetSplit(ctx, rest[0], weights)
		}, nil
	}
	return nil, fmt.Errorf("%q; accepted: get, set ROUTE POOL=WEIGHT…, clear ROUTE", strings.Join(words, " "))
}

func parseWeights(words []string) (map[string]uint32, error) {
	weights := map[string]uint32{}
	for _, word := range words {
		pool, value, found := strings.Cut(word, "=")
		weight, err := strconv.ParseUint(value, 10, 32)
		if !found || pool == "" || err != nil {
			return nil, fmt.Errorf("%q; accepted: POOL=WEIGHT with a whole number 0…4294967295", word)
		}
		if _, twice := weights[pool]; twice {
			return nil, fmt.Errorf("pool %q is named twice", pool)
		}
		weights[pool] = uint32(weight)
	}
	return weights, nil
}

func showSplits(w io.Writer, format string, splits []admin.Split) error {
	return show(w, format, splits, "ROUTE\tEFFECTIVE\tFILE\tBY HAND SINCE", func(w io.Writer) {
		for _, s := range splits {
			since := ""
			if s.ByHand {
				since = s.Since.Format(time.RFC3339)
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", s.Route, weightsText(s.Effective), weightsText(s.File), since)
		}
	})
}

func weightsText(weights []admin.Weight) string {
	var words []string
	for _, x := range weights {
		words = append(words, fmt.Sprintf("%s=%.2f%%", x.Pool, float64(x.BasisPoints)/100))
	}
	return strings.Join(words, " ")
}
