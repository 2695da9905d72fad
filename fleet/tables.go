package fleet

import (
	"math"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// APIVersion and Kind stand at the top of every config file.
const (
	APIVersion = "fairlead/v1alpha1"
	Kind       = "Fairlead"
)

// Ranges that Envoy sets: HTTP/2 windows and streams
// (envoy.config.core.v3.Http2ProtocolOptions).
const (
	minWindow  Bytes = 65_535
	maxWindow  Bytes = math.MaxInt32
	maxStreams int64 = math.MaxInt32
)

// maxNamed bounds pools, routes and groups. Plans number pools and routes with
// 16 bits, and metrics carry their names as labels.
const maxNamed = 4096

// maxChain is how many pools a route's chain may have: as many as a decision
// can list attempts (plan.MaxAttempts, which cannot be imported here; a test
// compares the two).
const maxChain = 8

// maxWeight keeps a weight × 10,000 far from any overflow.
const maxWeight = 1_000_000

// The tables below are the file's whole grammar: what they don't name is
// refused, and Schema is written from them.

func configFields(c *Config) []field {
	return []field{
		{name: "apiVersion", required: true, value: exactly(APIVersion)},
		{name: "kind", required: true, value: exactly(Kind)},
		{name: "serve", doc: "Where fairlead serve listens and keeps its state.", value: object(serveFields(&c.Serve))},
		{name: "groups", doc: "Sets of sidecars with one configuration.", required: true,
			value: list(&c.Groups, 1, maxNamed, func(g *Group) value { return object(groupFields(g)) })},
		{name: "pools", doc: "Sets of interchangeable model servers.", required: true,
			value: list(&c.Pools, 1, maxNamed, func(p *Pool) value { return object(poolFields(p)) })},
		{name: "routes", doc: "Which requests go to which pools.", required: true,
			value: list(&c.Routes, 1, maxNamed, func(r *Route) value { return object(routeFields(r)) })},
		{name: "providers", later: "pools alone; hosted providers cannot be configured yet"},
		{name: "limits", doc: "What each client may ask for.", value: list(&c.Limits, 0, maxNamed, func(l *Limit) value { return object(limitFields(l)) })},
	}
}

func serveFields(s *Serve) []field {
	return []field{
		{name: "xds", doc: "Where the xDS server listens.", preset: "unix:/run/fairlead/xds.sock", value: listenAddress(&s.XDS)},
		{name: "extproc", doc: "Where the ext_proc server listens.", preset: "unix:/run/fairlead/extproc.sock", value: listenAddress(&s.ExtProc)},
		{name: "accessLog", doc: "Where the access-log receiver listens.", preset: "unix:/run/fairlead/accesslog.sock", value: listenAddress(&s.AccessLog)},
		{name: "admin", doc: "Where metrics, health and the API are served; TCP only.", preset: "127.0.0.1:9900", value: adminAddress(&s.Admin)},
		{name: "push", doc: "Where fairlead agent pushes telemetry; absent: nowhere.", value: pushListener(&s.Push)},
		{name: "stateDir", doc: "Journal of weights set by hand.", preset: "/var/lib/fairlead", value: directory(&s.StateDir)},
		{name: "shard", doc: "The middle part of decision ids; replicas differ in it.", preset: "0", value: whole(&s.Shard, 0, 999)},
		{name: "redis", doc: "A Redis or Valkey server in which several replicas count limits together, with maxmemory-policy noeviction: a count that is evicted is room made. Absent: each process counts for itself.", value: optional(&s.Redis, redisFields)},
	}
}

func redisFields(r *Redis) []field {
	return []field{
		{name: "address", doc: "host:port or unix:/path.", required: true, value: dialAddress(&r.Address)},
		{name: "username", value: label(&r.Username)},
		{name: "password", doc: "env:NAME or file:/path, never the password itself.", value: secret(&r.Password)},
		{name: "database", preset: "0", value: whole(&r.Database, 0, 1024)},
		{name: "tls", doc: "Encrypt the connection.", preset: "false", value: boolean(&r.TLS)},
		{name: "ca", doc: "PEM file of the server's authority; absent: the system's.", value: file(&r.CA)},
		{name: "deadline", doc: "Bounds one question to the server. Envoy waits 200 ms for a decision, of which a request may be held for 60.", preset: "5ms", value: duration(&r.Deadline, time.Millisecond, 100*time.Millisecond)},
		{name: "onError", doc: "While it does not answer: local (each replica admits its part of the limit), open (everything passes), closed (nothing does).", preset: "local", value: choice(&r.OnError, nil, "local", "open", "closed")},
		{name: "replicas", doc: "How many processes share the limits; serve.shard 0 … replicas−1 says which part is whose.", required: true, value: whole(&r.Replicas, 1, 1000)},
	}
}

func limitFields(l *Limit) []field {
	return []field{
		{name: "name", doc: "Names the limit in metrics and logs, and what counts its windows: under another name they begin anew. Default: limit-1, limit-2, … by place, so that one that is put before others renames them.", value: nameOf(&l.Name)},
		{name: "key", doc: "What tells clients apart: the hash of the credential in authorization or x-api-key (a request with two different ones counts by its address, but on routes of the OpenAI dialect by a bearer in authorization), a claim of a verified token, the certificate's identity, or the address (of IPv6 its /64). A request that lacks it counts by its address.", preset: "authorization", value: choice(&l.Key, nil, "authorization", "jwt", "mtls", "address")},
		{name: "claim", doc: "The claim's name, with key jwt.", value: label(&l.Claim)},
		{name: "routes", doc: "Routes it counts for; absent: all that no other limit names.", value: list(&l.Routes, 0, maxNamed, reference)},
		{name: "requests", doc: "Requests per window, such as 600/min.", value: rate(&l.Requests)},
		{name: "tokens", doc: "Estimated input and declared output tokens per window; settled by usage where the route reads it. An estimate of more than a whole window takes all of one.", value: rate(&l.Tokens)},
		{name: "concurrency", doc: "Requests in flight; absent: no limit but the client's share.", value: whole(&l.Concurrency, 1, 1_000_000)},
		{name: "clients", doc: "Clients with limits of their own.", value: list(&l.Clients, 0, 10_000, func(c *LimitClient) value { return object(limitClientFields(c)) })},
	}
}

func limitClientFields(c *LimitClient) []field {
	return []field{
		{name: "id", doc: "By key: sha256: and the 64 hex digits of the hash of what authorization holds (Bearer sk-1, also where the key is sent without Bearer or as x-api-key), or the first 32, as fairlead clients shows them; the claim's value; the certificate's URI SAN or subject; the address.", required: true, value: label(&c.ID)},
		{name: "requests", doc: "Absent: the limit's.", value: rate(&c.Requests)},
		{name: "tokens", doc: "Absent: the limit's.", value: rate(&c.Tokens)},
		{name: "concurrency", doc: "Absent: the limit's.", value: whole(&c.Concurrency, 1, 1_000_000)},
		{name: "weight", doc: "Of its share among clients where there is not enough.", preset: "1", value: number(&c.Weight, 0.01, 1000)},
		{name: "class", doc: "Absent: the route's.", value: choice(&c.Class, nil, "interactive", "batch")},
	}
}

func listenerTLSFields(t *ListenerTLS) []field {
	return []field{
		{name: "certificate", doc: "PEM file of the chain.", required: true, value: file(&t.Certificate)},
		{name: "key", doc: "PEM file of its key.", required: true, value: file(&t.Key)},
		{name: "clientCA", doc: "PEM file of the authority that signs callers' certificates; absent: callers need none.", value: file(&t.ClientCA)},
	}
}

func jwtFields(j *JWT) []field {
	return []field{
		{name: "issuer", required: true, value: label(&j.Issuer)},
		{name: "audiences", doc: "Tokens must name one of them; absent: any.", value: list(&j.Audiences, 0, 64, label)},
		{name: "jwks", doc: "File with the issuer's keys.", required: true, value: file(&j.JWKS)},
	}
}

func decodeFields(d *Decode) []field {
	return []field{
		{name: "base", doc: "Inter-token latency at a batch of nothing; Llama-3.1-8B on an H100: 6.91ms.", required: true, value: duration(&d.Base, 0, time.Second)},
		{name: "perRequest", doc: "What each request in the batch adds; there 85.2us.", required: true, value: duration(&d.PerRequest, time.Nanosecond, time.Second)},
		{name: "target", doc: "The inter-token latency to keep.", required: true, value: duration(&d.Target, time.Millisecond, 10*time.Second)},
	}
}

func serverTLSFields(t *ServerTLS) []field {
	return []field{
		{name: "certificate", doc: "PEM file of the server's certificate chain.", required: true, value: file(&t.Certificate)},
		{name: "key", doc: "PEM file of its key.", required: true, value: file(&t.Key)},
		{name: "clientCA", doc: "PEM file of the authority that signs agents' certificates; a certificate's DNS name is the node its agent may speak for.", required: true, value: file(&t.ClientCA)},
	}
}

// adminAddress is a listenAddress that checkServe holds to TCP.
func adminAddress(into *Address) value {
	v := listenAddress(into)
	v.accepted = "IP:port, or a mapping with address and plaintext"
	return v
}

func groupFields(g *Group) []field {
	return []field{
		{name: "name", doc: "The node.cluster of the group's sidecars.", required: true, value: nameOf(&g.Name)},
		{name: "listener", doc: "What the sidecars listen with.", required: true, value: object(listenerFields(&g.Listener))},
		{name: "routes", doc: "Names of routes, in match order.", required: true, value: list(&g.Routes, 1, maxNamed, reference)},
	}
}

func listenerFields(l *Listener) []field {
	return []field{
		{name: "address", doc: "Where sidecars listen whose bootstrap names no other address.", required: true, value: ipPort(&l.Address, nil)},
		{name: "http2", doc: "Flow control towards clients.", value: object(http2Fields(&l.HTTP2))},
		{name: "peekDigits", doc: "Bodies are looked into when their content-length has at most so many digits.", preset: "6", value: whole(&l.PeekDigits, 1, 9)},
		{name: "drainTime", doc: "How long old connections live after a listener change; longer than the longest generation.", preset: "1h",
			value: duration(&l.DrainTime, time.Second, 24*time.Hour)},
		{name: "uploadTimeout", doc: "How long a request may take to arrive in full. Half-sent requests hold a place at a model server.", preset: "1m",
			value: duration(&l.UploadTimeout, time.Second, 24*time.Hour)},
		{name: "trusted", doc: "Callers whose x-request-id is kept.", value: list(&l.TrustedCIDRs, 0, anyNumber, network)},
		{name: "tls", doc: "TLS towards callers; files on the sidecar's machine. Absent: plaintext.", value: optional(&l.TLS, listenerTLSFields)},
		{name: "jwt", doc: "Whose tokens sidecars verify, on routes whose limit's key is jwt. Absent: nobody's.", value: optional(&l.JWT, jwtFields)},
	}
}

func http2Fields(h *HTTP2) []field {
	return []field{
		{name: "initialStreamWindow", doc: "Envoy's default: 16MiB.", value: size(&h.InitialStreamWindow, minWindow, maxWindow)},
		{name: "initialConnectionWindow", doc: "Envoy's default: 24MiB.", value: size(&h.InitialConnectionWindow, minWindow, maxWindow)},
		{name: "maxConcurrentStreams", doc: "Envoy's default: 1024.", value: whole(&h.MaxConcurrentStreams, 1, maxStreams)},
	}
}

func poolFields(p *Pool) []field {
	return []field{
		{name: "name", doc: "Also the Envoy cluster's name.", required: true, value: nameOf(&p.Name)},
		{name: "tier", doc: "A 429 is retried only in another tier. Default: the pool's name.", value: label(&p.Tier)},
		{name: "model", doc: "The model that its servers have: for people, and to learn how long its tokens are once for all routes.", value: label(&p.Model)},
		{name: "hardware", doc: "For people, and for the alert rules, which tell h100, a100, 4xh100 and rtx-4090 by how it begins.", value: label(&p.Hardware)},
		{name: "protocol", doc: "What the servers speak. vLLM's server refuses h2c.", preset: "http1", value: choice(&p.Protocol, []string{"h2"}, "http1", "h2c")},
		{name: "http2", doc: "Flow control towards the servers; with protocol h2c.", value: object(http2Fields(&p.HTTP2))},
		{name: "endpoints", doc: "The servers; an empty list makes the pool fail over at once.", required: true,
			value: list(&p.Endpoints, 0, anyNumber, func(e *Endpoint) value { return object(endpointFields(e)) })},
		{name: "maxInFlight", doc: "Concurrent attempts per endpoint.", preset: "256", value: whole(&p.MaxInFlight, 1, 65_535)},
		{name: "limit", doc: "fixed: maxInFlight is the limit. learned: it is the upper end, and the KV cache, the batch (see decode) and the time to first token may lower it.", preset: "fixed", value: choice(&p.Limit, nil, "fixed", "learned")},
		{name: "decode", doc: "How inter-token latency grows with the batch; bounds it, with limit learned.", value: optional(&p.Decode, decodeFields)},
		{name: "healthCheck", doc: "Envoy's active check; absent: none.", value: optional(&p.HealthCheck, healthCheckFields)},
		{name: "outlierDetection", doc: "Let Envoy eject endpoints after three 502, 503 or 504 in a row, or five of any 5xx; refused connections eject nobody (see healthCheck).", preset: "false", value: boolean(&p.OutlierDetection)},
		{name: "connectTimeout", preset: "3s", value: duration(&p.ConnectTimeout, time.Millisecond, time.Minute)},
		{name: "telemetry", doc: "Where the pool's numbers come from.", value: object(telemetryFields(&p.Telemetry))},
		{name: "kvBytesPerToken", doc: "What one token takes in the KV cache, for showing allocation in MB/s; Llama-3.1-8B in bf16: 128KiB.", value: size(&p.KVBytesPerToken, 1, 1<<30)},
		{name: "spillAt", doc: "From this share of its endpoints' maxInFlight · (1 − risk) in use, a zone's requests go to other zones too.", preset: "0.7", value: number(&p.SpillAt, 0.1, 1)},
	}
}

func endpointFields(e *Endpoint) []field {
	return []field{
		{name: "name", doc: "For people. Default: the address.", value: label(&e.Name)},
		{name: "address", required: true, value: ipPort(&e.Address, unconnectable)},
		{name: "node", doc: "The machine it runs on; required where its pool's telemetry is pushed over serve.push.tls, as a DNS name in its agent's certificate. Only agents of nodes that stand here may push, and at most 64 others for endpoints without one.", value: label(&e.Node)},
		{name: "zone", doc: "Where it is; sidecars started with --zone prefer endpoints of theirs.", value: label(&e.Zone)},
		{name: "gpus", doc: "UUIDs of its GPUs.", value: list(&e.GPUs, 0, anyNumber, label)},
		{name: "capacity", doc: "Relative to the pool's other endpoints.", preset: "1", value: number(&e.Capacity, 0.01, 1000)},
		{name: "drain", doc: "Take it out of service: no new requests, also when nothing else is left; running ones end.", preset: "false", value: boolean(&e.Drain)},
	}
}

func healthCheckFields(h *HealthCheck) []field {
	return []field{
		{name: "path", preset: "/health", value: urlPath(&h.Path)},
		{name: "interval", preset: "1s", value: duration(&h.Interval, 10*time.Millisecond, time.Hour)},
		{name: "timeout", preset: "500ms", value: duration(&h.Timeout, time.Millisecond, time.Minute)},
		{name: "unhealthyThreshold", preset: "2", value: whole(&h.UnhealthyThreshold, 1, 100)},
		{name: "healthyThreshold", preset: "1", value: whole(&h.HealthyThreshold, 1, 100)},
	}
}

func telemetryFields(t *Telemetry) []field {
	return []field{
		{name: "source", doc: "none keeps weights at capacity; scrape reads Prometheus pages; push takes what fairlead agent sends.", preset: "none",
			value: choice(&t.Source, nil, "none", "scrape", "push")},
		{name: "interval", preset: "200ms", value: duration(&t.Interval, 10*time.Millisecond, time.Minute)},
		{name: "enginePath", doc: "The model server's page.", preset: "/metrics", value: urlPath(&t.EnginePath)},
		{name: "gpuPath", doc: "A page like dcgm-exporter's; absent: none.", value: urlPath(&t.GPUPath)},
		{name: "gpuPort", doc: "The port of the GPU page, when it is not the endpoint's.", value: whole(&t.GPUPort, 1, 65_535)},
	}
}

func routeFields(r *Route) []field {
	return []field{
		{name: "name", required: true, value: nameOf(&r.Name)},
		{name: "match", required: true, value: object(matchFields(&r.Match))},
		{name: "dialect", doc: "The API its clients speak; errors are written in it.", required: true, value: choice(&r.Dialect, nil, "openai", "anthropic")},
		{name: "strategy", doc: "Who picks the endpoint: Envoy (legacy) or the plan (dynamic).", preset: "dynamic", value: choice(&r.Strategy, nil, "legacy", "dynamic")},
		{name: "clientStrategy", doc: "What a client's x-route-strategy does: honor takes dynamic as that, and any other value as legacy.", preset: "honor", value: choice(&r.ClientStrategy, nil, "honor", "ignore")},
		{name: "trustDeclared", doc: "Believe the max_tokens header where it is a whole number, and skip the body then.", preset: "false", value: boolean(&r.TrustDeclared)},
		{name: "defaultMaxTokens", doc: "The output budget of a request that declares none.", preset: "512", value: whole(&r.DefaultMaxTokens, 1, 10_000_000)},
		{name: "pool", doc: "The only pool; or give a split.", value: solePool(&r.Split)},
		{name: "split", doc: "Pools with weights, the canary first; published as basis points.",
			value: list((*[]SplitWeight)(&r.Split), 1, maxChain, func(w *SplitWeight) value { return object(armFields(w)) })},
		{name: "affinity", doc: "session keeps requests with one x-session-affinity (or the body's prompt_cache_key) on one endpoint while that has room.", preset: "session", value: choice(&r.Affinity, nil, "none", "session")},
		{name: "fallback", doc: "Pools tried after those of the split, in order.", value: list(&r.Fallback, 0, maxChain, func(pool *string) value { return object(fallbackFields(pool)) })},
		{name: "timeouts", value: object(timeoutFields(&r.Timeouts))},
		{name: "retryBody", doc: "The largest body that can be sent a second time.", preset: "8MiB", value: size(&r.RetryBody, 1, 1<<30)},
		{name: "maxBody", doc: "The largest body accepted.", preset: "64MiB", value: size(&r.MaxBody, 1, 1<<30)},
		{name: "skipBody", doc: "Do not look for max_tokens and the like in the body: only headers count.", preset: "false", value: boolean(&r.SkipBody)},
		{name: "readUser", doc: "Take the body's user for the session where nothing else names one. It stands in log entries.", preset: "false", value: boolean(&r.ReadUser)},
		{name: "generates", doc: "Which requests make the model generate and are limited, of those with another method than GET, HEAD, OPTIONS, DELETE, TRACE or CONNECT, and of those that ask for an upgrade (WebSocket) with any: paths (whose path is / or ends as those of the common APIs: " + strings.Join(generatingPaths, ", ") + ") or all. Others pass without limits. Those that generate are also tried again elsewhere when a server breaks off, which may have done its work: give all only to paths that bear it.", preset: "paths", value: choice(&r.Generates, nil, "paths", "all")},
		{name: "onFailure", doc: "While ext_proc is dead and nobody counts limits: open lets requests pass, closed answers those that generate with 503.", preset: "open", value: choice(&r.OnFailure, nil, "open", "closed")},
		{name: "class", doc: "How urgent its requests are; a caller may lower it by x-request-class: batch.", preset: "interactive", value: choice(&r.Class, nil, "interactive", "batch")},
		{name: "fairShare", doc: "Keep a client from more than its share of a pool that is full.", preset: "true", value: boolean(&r.FairShare)},
		{name: "holdAtSidecar", doc: "Bound the requests in flight to each pool of the route in each sidecar too, to an even part of the pool's limit; holds with Fairlead dead. It counts for the pool: the group's other routes to it are held too. Each replica of serve divides by the sidecars that it has itself: with several, the sidecars together may have as many times the limit.", preset: "false", value: boolean(&r.HoldAtSidecar)},
		{name: "maxOutput", doc: "The model's limit on output tokens; absent: unknown.", value: whole(&r.MaxOutput, 1, 10_000_000)},
		{name: "oversize", doc: "Requests above maxOutput: refuse (400, with what fits) or pass.", preset: "refuse", value: choice(&r.Oversize, nil, "refuse", "pass")},
		{name: "noRoom", doc: "Requests that no endpoint's KV cache has room for: refuse (429 with what fits now; 400 where it is, at the least, more than a whole cache) or pass. The prompt is estimated from the body's length, images in it too; an estimate beyond the largest cache waits for an empty one.", preset: "pass", value: choice(&r.NoRoom, nil, "refuse", "pass")},
		{name: "unread", doc: "Requests whose body Envoy does not read (no content-length, longer than peekDigits says, compressed, no JSON; upgraded connections too): pass (they count as defaultMaxTokens, and are settled by their length) or refuse (400). A max_tokens header helps only with trustDeclared. Where limits must hold, refuse.", preset: "pass", value: choice(&r.Unread, nil, "refuse", "pass")},
		{name: "usage", doc: "Let Envoy read the tokens used out of answers. accept-encoding is taken off these requests: it reads no compressed answers.", preset: "false", value: boolean(&r.Usage)},
		{name: "retryFields", doc: "Where the retry fields come from that a 429, 503 or 529 of a server lacks: fixed (one second, by Envoy) or computed (the answer's headers are sent to Fairlead).", preset: "fixed", value: choice(&r.RetryFields, nil, "fixed", "computed")},
	}
}

func matchFields(m *Match) []field {
	return []field{
		{name: "prefix", doc: "How the path begins.", required: true, value: urlPath(&m.Prefix)},
		{name: "model", doc: "What the body's top-level model must equal.", value: label(&m.Model)},
		{name: "connect", doc: "Let CONNECT requests use this route.", preset: "false", value: boolean(&m.Connect)},
	}
}

func armFields(w *SplitWeight) []field {
	return []field{
		{name: "pool", required: true, value: reference(&w.Pool)},
		{name: "weight", doc: "Any numbers; they are scaled to 10,000.", required: true, value: whole(&w.Weight, 0, maxWeight)},
	}
}

func fallbackFields(pool *string) []field {
	return []field{
		{name: "pool", required: true, value: reference(pool)},
		{name: "provider", later: "pool; hosted providers cannot be configured yet"},
		{name: "static", later: "pool; static answers cannot be configured yet"},
	}
}

func timeoutFields(t *Timeouts) []field {
	return []field{
		{name: "firstToken", doc: "Bounds the wait for each attempt's response headers, of streaming requests. Absent: no bound.",
			value: duration(&t.FirstToken, time.Millisecond, time.Hour)},
		{name: "connect", later: "pools[].connectTimeout"},
	}
}

// solePool is short for a split with one arm.
func solePool(into *Split) value {
	var pool string
	v := reference(&pool)
	read := v.read
	v.read = func(d *decoder, n *yaml.Node, path string) {
		read(d, n, path)
		*into = Split{{Pool: pool, Weight: 1}}
	}
	return v
}
