// Command peer measures Fairlead's decision beside the scheduler of
// gateway-api-inference-extension v1.5.0, in rounds that take turns within one
// process, and prints one JSON object a line: {"n", "what", "nanoseconds",
// "allocations", "bytes"}, the last three per decision. Command bench runs it.
//
// The scheduler is the real one with the scorers, weights and picker of its
// default configuration (queue depth 2, KV-cache utilisation 2, prefix cache 3,
// highest score), with endpoints and metrics in memory: parsing of requests,
// scraping and its own ext_proc server are not in it, nor are logs (a discarding
// logger). Fairlead is measured twice: plan.Decide alone, and the whole ext_proc
// handler without a transport, which also reads Envoy's message, classes the
// request, asks admission, keeps the ledger and writes the answer.
//
// It is a module of its own: the scheduler brings a thousand packages.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	k8stypes "k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"
	fwkdl "sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/datalayer"
	fwksched "sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/scheduling"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/plugins/scheduling/picker"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/plugins/scheduling/profile"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/plugins/scheduling/scorer/kvcacheutilization"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/plugins/scheduling/scorer/prefix"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/plugins/scheduling/scorer/queuedepth"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/scheduling"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

func main() {
	rounds := flag.Int("rounds", 7, "rounds of all pieces")
	each := flag.Duration("each", 500*time.Millisecond, "how long a piece runs in a round")
	flag.Parse()
	if err := run(*rounds, *each); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// piece is one decision, over and over.
type piece struct {
	n      int
	what   string
	decide func() error
	// after, if set, runs off the clock after every chunk of decisions.
	after func() error
}

// chunk is how many decisions are timed at once.
const chunk = 64

// line is what is printed of one piece in one round.
type line struct {
	N           int     `json:"n"`
	What        string  `json:"what"`
	Nanoseconds float64 `json:"nanoseconds"`
	Allocations float64 `json:"allocations"`
	Bytes       float64 `json:"bytes"`
}

func run(rounds int, each time.Duration) error {
	var pieces []piece
	for _, n := range []int{5, 25, 100, 500} {
		peer, err := scheduler(n)
		if err != nil {
			return err
		}
		decide, handler, err := fairlead(n)
		if err != nil {
			return err
		}
		pieces = append(pieces, piece{n: n, what: "gaie", decide: peer}, decide, handler)
	}
	out := json.NewEncoder(os.Stdout)
	for range rounds {
		for _, p := range pieces {
			l, err := measure(p, each)
			if err != nil {
				return fmt.Errorf("%s at n = %d: %w", p.what, p.n, err)
			}
			if err := out.Encode(l); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure times a piece for about d, after a tenth of that to warm up.
func measure(p piece, d time.Duration) (line, error) {
	if _, _, err := p.spend(d / 10); err != nil {
		return line{}, err
	}
	runtime.GC()
	took, count, err := p.spend(d)
	if err != nil {
		return line{}, err
	}
	l := line{N: p.n, What: p.what, Nanoseconds: float64(took.Nanoseconds()) / float64(count)}
	// Counting allocations stops the world, so it has a chunk of its own.
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range chunk {
		if err := p.decide(); err != nil {
			return line{}, err
		}
	}
	runtime.ReadMemStats(&after)
	l.Allocations = float64(after.Mallocs-before.Mallocs) / chunk
	l.Bytes = float64(after.TotalAlloc-before.TotalAlloc) / chunk
	return l, p.settle()
}

// spend decides until d has been spent on it.
func (p piece) spend(d time.Duration) (took time.Duration, count int, err error) {
	for took < d {
		begin := time.Now()
		for range chunk {
			if err := p.decide(); err != nil {
				return took, count, err
			}
		}
		took += time.Since(begin)
		count += chunk
		if err := p.settle(); err != nil {
			return took, count, err
		}
	}
	return took, count, nil
}

func (p piece) settle() error {
	if p.after == nil {
		return nil
	}
	return p.after()
}

// scheduler is the peer with n endpoints.
func scheduler(n int) (func() error, error) {
	ctx := log.IntoContext(context.Background(), logr.Discard())
	prefixes, err := prefix.New(ctx)
	if err != nil {
		return nil, err
	}
	// pkg/epp/config/loader/defaults.go of v1.5.0.
	byDefault := scheduling.NewSchedulerProfile().
		WithScorers(
			scheduling.NewWeightedScorer(queuedepth.NewQueueScorer(), 2),
			scheduling.NewWeightedScorer(kvcacheutilization.NewKVCacheUtilizationScorer(), 2),
			scheduling.NewWeightedScorer(prefixes, 3)).
		WithPicker(picker.NewMaxScorePicker(picker.DefaultMaxNumOfEndpoints))
	s := scheduling.NewSchedulerWithConfig(scheduling.NewSchedulerConfig(
		profile.NewSingleProfileHandler(), map[string]fwksched.SchedulerProfile{"default": byDefault}))
	endpoints := make([]fwksched.Endpoint, n)
	for i := range endpoints {
		endpoints[i] = fwksched.NewEndpoint(
			&fwkdl.EndpointMetadata{NamespacedName: k8stypes.NamespacedName{Name: fmt.Sprint("pod-", i)}},
			&fwkdl.Metrics{WaitingQueueSize: i * 7 % 5, KVCacheUsagePercent: float64(i*13%100) / 100}, nil)
	}
	request := &fwksched.LLMRequest{RequestId: "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55", TargetModel: "llama-3.1-8b"}
	return func() error {
		result, err := s.Schedule(ctx, request, endpoints)
		if err == nil && len(result.ProfileResults["default"].TargetEndpoints) == 0 {
			err = fmt.Errorf("no endpoint was picked")
		}
		return err
	}, nil
}

// fairlead is plan.Decide and the whole handler with n endpoints.
func fairlead(n int) (decide, handler piece, err error) {
	decide, handler = piece{n: n, what: "decide"}, piece{n: n, what: "handler"}
	in, keys := inputs(n)
	ledger := accesslog.NewLedger(time.Now)
	// Slots are the ledger's own numbers, in the order they are asked for.
	for i, key := range keys {
		if slot := ledger.Slot(key); slot != in.Pools[0].Endpoints[i].Slot {
			in.Pools[0].Endpoints[i].Slot = slot
		}
	}
	p, err := plan.Compile(in)
	if err != nil {
		return decide, handler, err
	}
	route, known := p.Route("chat")
	if !known {
		return decide, handler, fmt.Errorf("no route")
	}
	class := plan.Class{Route: route, Arm: 0, Level: 2, Strategy: fleet.StrategyDynamic, Generates: true, Prompt: 75}
	var seed uint64
	decide.decide = func() error {
		seed++
		if d := p.Decide(class, seed, ledger); d.Action != plan.ActionSteer {
			return fmt.Errorf("decision %v: %v", d.Action, d.Reason)
		}
		return nil
	}

	ids, err := extproc.NewIDs(1, time.Now)
	if err != nil {
		return decide, handler, err
	}
	var current atomic.Pointer[plan.Plan]
	current.Store(p)
	cfg, err := fleet.Parse("bench.yaml", config(n))
	if err != nil {
		return decide, handler, err
	}
	gate := admission.New(admission.Options{Config: cfg})
	service := extproc.New(extproc.Options{Plan: current.Load, Live: ledger, Ledger: ledger, IDs: ids, Admission: gate})
	message, err := proto.Marshal(request())
	if err != nil {
		return decide, handler, err
	}
	// answers of one chunk; their requests end off the clock.
	answers, count := make([][]byte, chunk), 0
	handler.decide = func() error {
		var err error
		answers[count], err = service.Exchange(answers[count][:0], message)
		count++
		return err
	}
	handler.after = func() error {
		for _, a := range answers[:count] {
			id, err := decisionOf(a)
			if err != nil {
				return err
			}
			ledger.Cancel(id)
			gate.Cancel(id)
		}
		count = 0
		gate.Step(time.Now(), []admission.PoolView{{Name: "servers", Limit: float64(65_535 * n)}})
		return nil
	}
	return decide, handler, nil
}

// decisionOf reads the decision id out of an answer that lets a request go on.
func decisionOf(answer []byte) (string, error) {
	var r extprocv3.ProcessingResponse
	if err := proto.Unmarshal(answer, &r); err != nil {
		return "", err
	}
	if r.GetDynamicMetadata().GetFields()[wire.NamespaceSteer] == nil {
		return "", fmt.Errorf("not steered: %v", &r)
	}
	return r.GetDynamicMetadata().GetFields()[wire.NamespaceLog].GetStructValue().GetFields()[wire.KeyDecision].GetStringValue(), nil
}

// config is the configuration that admission goes by.
func config(n int) []byte {
	var b bytes.Buffer
	b.WriteString(`apiVersion: fairlead/v1alpha1
kind: Fairlead
groups: [{ name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat] }]
routes: [{ name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, pool: servers }]
limits: [{ key: authorization, concurrency: 1000000 }]
pools:
  - name: servers
    maxInFlight: 65535
    endpoints:
`)
	for i := range n {
		fmt.Fprintf(&b, "      - { address: %s }\n", addressOf(i))
	}
	return b.Bytes()
}

func addressOf(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 8000)
}

// inputs is a pool of n endpoints with unequal weights and risks behind one route.
func inputs(n int) (plan.Inputs, []fleet.EndpointKey) {
	pool := plan.PoolInput{Name: "servers", Tier: "servers"}
	var keys []fleet.EndpointKey
	for i := range n {
		at := addressOf(i)
		keys = append(keys, fleet.EndpointKey{Pool: pool.Name, Address: at})
		pool.Endpoints = append(pool.Endpoints, plan.EndpointInput{
			Address: at, Slot: uint32(i), Weight: 0.02 + float64(i%50)/50,
			KVFree: fleet.Tokens(100_000 + i%7*300), Risk: fleet.Risk(float64(i%30) / 100), State: fleet.StateNeutral,
		})
	}
	return plan.Inputs{Tick: 1, Pools: []plan.PoolInput{pool}, Routes: []plan.RouteInput{{
		Name: "chat", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic,
		ClientStrategy: fleet.ClientStrategyHonor, DefaultBudget: 512, Split: []string{pool.Name},
	}}}, keys
}

// request is what Envoy sends for a chat completion of an official SDK.
func request() *extprocv3.ProcessingRequest {
	headers := &corev3.HeaderMap{}
	for _, h := range [][2]string{
		{":method", "POST"}, {":path", "/v1/chat/completions"}, {":authority", "models.example"}, {":scheme", "http"},
		{"accept", "application/json"}, {"accept-encoding", "gzip, deflate"}, {"content-type", "application/json"},
		{"user-agent", "OpenAI/Python 3.3.1"}, {"authorization", "Bearer sk-0123456789abcdef0123456789abcdef0123456789abcdef"},
		{"x-stainless-lang", "python"}, {"x-stainless-package-version", "3.3.1"}, {"x-stainless-os", "Linux"},
		{"x-stainless-arch", "x64"}, {"x-stainless-runtime", "CPython"}, {"x-stainless-retry-count", "0"},
		{"x-stainless-read-timeout", "600"}, {"content-length", "300"}, {"x-forwarded-proto", "http"},
		{"x-request-id", "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55"}, {wire.HeaderDraw, "123456"}, {wire.HeaderMaxTokens, "64"},
	} {
		headers.Headers = append(headers.Headers, &corev3.HeaderValue{Key: h[0], RawValue: []byte(h[1])})
	}
	text := structpb.NewStringValue
	return &extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: headers}},
		Attributes: map[string]*structpb.Struct{wire.AttributesKey: {Fields: map[string]*structpb.Value{
			wire.AttributeRouteName: text("chat"), wire.AttributeClusterName: text("servers"),
			wire.AttributeSource: text("192.0.2.7:53211"), wire.AttributeZone: text(""),
		}}},
		MetadataContext: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{wire.NamespacePeek: {Fields: map[string]*structpb.Value{
			wire.KeyMaxTokens: structpb.NewNumberValue(64), wire.KeyModel: text("llama-3.1-8b"), wire.KeyStream: structpb.NewBoolValue(true),
		}}}},
	}
}
