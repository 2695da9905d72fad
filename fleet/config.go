package fleet

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Config is one whole, valid configuration with all defaults filled in.
// It is immutable after [Parse].
type Config struct {
	Serve  Serve
	Groups []Group
	Pools  []Pool
	Routes []Route
	// Limits are the clients' rates and concurrency; a route is subject to one of
	// them at most, see Config.LimitOf.
	Limits []Limit
	// Digest is the hex SHA-256 of the parsed file's bytes.
	Digest string
}

// Serve says where `fairlead serve` listens and keeps its state.
type Serve struct {
	XDS       Address // delta ADS; default unix:/run/fairlead/xds.sock
	ExtProc   Address // ext_proc; default unix:/run/fairlead/extproc.sock
	AccessLog Address // gRPC access-log receiver; default unix:/run/fairlead/accesslog.sock
	Admin     Address // HTTP: metrics, health, API; TCP only; default 127.0.0.1:9900
	Push      Push    // where agents push telemetry; absent: nowhere
	StateDir  string  // journal of weights set by hand; default /var/lib/fairlead
	Shard     int     // 0…999, the middle part of decision ids; replicas differ in it
	// Redis, if not nil, is where several replicas keep the counts of Limits in
	// common; nil: each process counts for itself.
	Redis *Redis
}

// Changes lists the keys whose values differ in another Serve, such as "serve.shard".
func (s *Serve) Changes(other *Serve) (keys []string) {
	a, b := reflect.ValueOf(*s), reflect.ValueOf(*other)
	for _, f := range serveFields(&Serve{}) {
		named := func(name string) bool { return strings.EqualFold(name, f.name) }
		if !reflect.DeepEqual(a.FieldByNameFunc(named).Interface(), b.FieldByNameFunc(named).Interface()) {
			keys = append(keys, "serve."+f.name)
		}
	}
	return keys
}

// OnError says what becomes of limited requests while Redis does not answer.
type OnError uint8

// Choices of OnError.
const (
	OnErrorLocal  OnError = iota + 1 // each replica admits its share of the limit
	OnErrorOpen                      // everything is admitted
	OnErrorClosed                    // nothing is admitted
)

// Redis is a Redis or Valkey server that keeps shared counts.
type Redis struct {
	// Address is host:port, or unix:/path.
	Address  string
	Username string
	// Password is a reference: "env:NAME" or "file:/path"; "" is none.
	Password Secret
	Database int
	// TLS encrypts the connection; CA names the PEM file of the server's
	// authority, "" is the system's.
	TLS bool
	CA  string
	// Deadline bounds one question; default 5ms.
	Deadline time.Duration
	OnError  OnError
	// Replicas is how many processes share the limits; while Redis is away each
	// admits its part. Serve.Shard 0 … Replicas−1 says which part is whose.
	Replicas int
}

// Secret is a reference to a secret, "env:NAME" or "file:/path"; never the
// secret itself.
type Secret string

// ClientKey says by what a limit tells clients apart. None of it is a header
// that a caller may invent at will and be taken for somebody else.
type ClientKey uint8

// Client keys.
const (
	ClientKeyAuthorization ClientKey = iota + 1 // SHA-256 of the credential in authorization or x-api-key
	ClientKeyJWT                                // a claim of a token that Envoy has verified
	ClientKeyMTLS                               // the URI SAN, else the subject, of the caller's certificate
	ClientKeyAddress                            // the caller's IP address, of IPv6 its /64
)

// RequestClass is how urgent requests are.
type RequestClass uint8

// Request classes.
const (
	ClassInteractive RequestClass = iota + 1
	ClassBatch
)

// Rate is an amount per fixed window. The zero Rate is no limit.
type Rate struct {
	Amount int64
	Window time.Duration // 1s, 1m, 1h or 24h
}

// Limit is what each client of some routes may ask for.
type Limit struct {
	Name string
	Key  ClientKey
	// Claim is the name of the claim, for ClientKeyJWT.
	Claim string
	// Routes are those it counts for; empty: all that no other limit names.
	Routes   []string
	Requests Rate // requests per window
	Tokens   Rate // estimated input and declared output tokens per window
	// Concurrency is how many requests a client may have in flight; 0: no limit
	// but its share.
	Concurrency int
	// Clients are exceptions, by who they are.
	Clients []LimitClient
}

// LimitClient is one client's own limit. Zero rates and a zero concurrency take
// the limit's.
type LimitClient struct {
	// ID is "sha256:" and the 64 hex digits of the credential's hash, or the first 32
	// of them, a claim's value, a SAN or subject, or an address, by Limit.Key. The
	// credential is the value of authorization in its usual spelling: the scheme with a
	// capital first letter and none behind, one space, the rest as sent ("Bearer sk-1").
	// Callers that spell it otherwise, leave Bearer away or send it as x-api-key are the
	// same client.
	ID          string
	Requests    Rate
	Tokens      Rate
	Concurrency int
	// Weight of its share among clients where there is not enough; default 1.
	Weight float64
	// Class, if not 0, goes before the route's.
	Class RequestClass
}

// Push is where `fairlead agent` delivers telemetry. The zero Push listens
// nowhere.
type Push struct {
	Address Address
	// TLS is nil on a Unix socket, on loopback, and where the address says
	// plaintext. Clients must show a certificate that ClientCA signed, and its
	// DNS name is the node they may speak for: who can push unasked can eject
	// GPUs.
	TLS *ServerTLS
}

// ServerTLS names PEM files; they are read anew when they change.
type ServerTLS struct {
	Certificate, Key, ClientCA string
}

// Address is a place to listen on or to connect to. The zero Address is no
// place at all.
type Address struct {
	// Path is a Unix socket's path, or "" for TCP.
	Path string
	// Host is a TCP host with port ("127.0.0.1:9900"), or "" for a Unix socket.
	Host string
	// Plaintext allows TCP without TLS beyond loopback; the config must say so
	// in that word.
	Plaintext bool
}

// ParseAddress reads "unix:/path" or "host:port".
func ParseAddress(s string) (Address, error) {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		if path == "" {
			return Address{}, fmt.Errorf("%q has no path after unix:; accepted: unix:/path or host:port", s)
		}
		return Address{Path: path}, nil
	}
	if _, err := netip.ParseAddrPort(s); err == nil {
		return Address{Host: s}, nil
	}
	return Address{}, fmt.Errorf("found %q; accepted: unix:/path or IP:port", s)
}

// Network returns "unix" or "tcp".
func (a Address) Network() string {
	if a.Path != "" {
		return "unix"
	}
	return "tcp"
}

// Target returns the path or host:port, as net.Listen and net.Dial take it.
func (a Address) Target() string {
	if a.Path != "" {
		return a.Path
	}
	return a.Host
}

// String returns the form [ParseAddress] reads.
func (a Address) String() string {
	if a.Path != "" {
		return "unix:" + a.Path
	}
	return a.Host
}

// Group is a set of sidecars with one configuration: the sidecars whose
// node.cluster is Name.
type Group struct {
	Name     string
	Listener Listener
	// Routes are names of Config.Routes, in match order.
	Routes []string
}

// Listener is what a group's sidecars listen with.
type Listener struct {
	// Address is the default listening address; a sidecar's bootstrap may name
	// another (`fairlead bootstrap --listen`).
	Address netip.AddrPort
	HTTP2   HTTP2
	// PeekDigits is the largest number of content-length digits for which the
	// body's fields are read; 1…9, default 6 (up to 999,999 bytes).
	PeekDigits int
	// DrainTime is how long old connections live after a listener change;
	// longer than the longest generation. Default 1h.
	DrainTime time.Duration
	// UploadTimeout is how long a request may take to arrive in full; it is
	// answered 408 then. Half-sent requests hold a place at a model server.
	// Default 1m.
	UploadTimeout time.Duration
	// TrustedCIDRs are caller addresses whose x-request-id is kept.
	TrustedCIDRs []netip.Prefix
	// TLS, if not nil, is what the sidecars listen with.
	TLS *ListenerTLS
	// JWT, if not nil, is whose tokens the sidecars verify, on routes whose
	// limit tells clients apart by a claim.
	JWT *JWT
}

// ListenerTLS names PEM files on the sidecar's machine.
type ListenerTLS struct {
	Certificate, Key string
	// ClientCA, if set, makes callers show a certificate that it signed.
	ClientCA string
}

// JWT is an issuer of tokens.
type JWT struct {
	Issuer    string
	Audiences []string
	// JWKS is a file with the issuer's keys on the sidecar's machine.
	JWKS string
}

// HTTP2 holds flow-control settings. Zero means Envoy's default (16 MiB stream,
// 24 MiB connection, 1024 streams).
type HTTP2 struct {
	InitialStreamWindow     Bytes // 65,535 … 2³¹−1 bytes
	InitialConnectionWindow Bytes // 65,535 … 2³¹−1 bytes
	MaxConcurrentStreams    uint32
}

// Protocol is what a pool's servers speak.
type Protocol uint8

// Protocols.
const (
	HTTP1 Protocol = iota + 1
	H2C            // HTTP/2 with prior knowledge, without TLS
)

// Pool is a set of interchangeable model servers.
type Pool struct {
	Name     string // [a-z0-9-], at most 63 bytes; also the Envoy cluster's name
	Tier     string // default: Name. A 429 is retried only across tiers
	Model    string // as people know it; pools of one model have one tokenizer
	Hardware string // informative
	Protocol Protocol
	HTTP2    HTTP2
	// Endpoints may be empty: such a pool fails over at once.
	Endpoints []Endpoint
	// MaxInFlight bounds concurrent attempts per endpoint; default 256.
	MaxInFlight int
	// HealthCheck is Envoy's active check, or nil.
	HealthCheck *HealthCheck
	// OutlierDetection lets Envoy eject endpoints after three answers of 502, 503
	// or 504 in a row, or five of any 5xx, for requests that Envoy's own balancer
	// steers. Connection errors eject nobody.
	OutlierDetection bool
	ConnectTimeout   time.Duration // default 3s
	Telemetry        Telemetry
	// KVBytesPerToken is what one token takes in the KV cache, for showing
	// allocation in MB/s; 0 if unknown. Llama-3.1-8B in bf16: 128KiB.
	KVBytesPerToken Bytes
	// Limit says whether MaxInFlight is the limit or its upper end.
	Limit LimitMode
	// Decode, if not nil, is how the pool's servers slow down with their batch;
	// with LimitLearned it bounds the batch.
	Decode *Decode
	// SpillAt is the share of the capacity of a zone's endpoints from which
	// requests of that zone's sidecars go to other zones too; default 0.7.
	SpillAt float64
}

// LimitMode says what an endpoint's limit in flight is.
type LimitMode uint8

// Limit modes.
const (
	LimitFixed   LimitMode = iota + 1 // MaxInFlight
	LimitLearned                      // at most that; less by KV cache, batch and time to first token
)

// Decode is the linear law of inter-token latency: Base + PerRequest · batch.
type Decode struct {
	Base, PerRequest time.Duration
	// Target is the inter-token latency that the batch must keep.
	Target time.Duration
}

// Batch is the largest batch that keeps the target, at least 1:
// (Target − Base) / PerRequest.
func (d Decode) Batch() int {
	if d.PerRequest <= 0 {
		return 1
	}
	return max(1, int((d.Target-d.Base)/d.PerRequest))
}

// Endpoint is one model server.
type Endpoint struct {
	Name    string         // label for people; default: the address
	Address netip.AddrPort // unique within a pool
	Node    string
	Zone    string
	GPUs    []string
	// Capacity is relative to the other endpoints of the pool; default 1.
	Capacity float64
	// Drain takes it out of service: no new requests, running ones end.
	Drain bool
}

// HealthCheck is an HTTP check by Envoy.
type HealthCheck struct {
	Path               string        // default /health
	Interval           time.Duration // default 1s
	Timeout            time.Duration // default 500ms
	UnhealthyThreshold uint32        // default 2
	HealthyThreshold   uint32        // default 1
}

// TelemetrySource says where a pool's numbers come from.
type TelemetrySource uint8

// Telemetry sources.
const (
	TelemetryNone   TelemetrySource = iota + 1 // weights stay at capacity
	TelemetryScrape                            // Prometheus pages of the model server and of dcgm-exporter
	TelemetryPush                              // frames of `fairlead agent`
)

// Telemetry configures a pool's telemetry.
type Telemetry struct {
	Source   TelemetrySource
	Interval time.Duration // default 200ms
	// EnginePath is the model server's page on the endpoint's own address;
	// default /metrics.
	EnginePath string
	// GPUPath is a dcgm-exporter-like page on the endpoint's own address, or
	// "" for none.
	GPUPath string
	// GPUPort, if not 0, is the port of the GPU page on the endpoint's host.
	GPUPort uint16
}

// Dialect is the API that a route's clients speak; errors are written in it.
type Dialect uint8

// Dialects.
const (
	DialectOpenAI Dialect = iota + 1
	DialectAnthropic
)

// Strategy says who picks the endpoint.
type Strategy uint8

// Strategies.
const (
	StrategyLegacy  Strategy = iota + 1 // Envoy's split and load balancing
	StrategyDynamic                     // the plan
)

// ClientStrategy says what a client's x-route-strategy header may do.
type ClientStrategy uint8

// Client strategies.
const (
	ClientStrategyHonor ClientStrategy = iota + 1
	ClientStrategyIgnore
)

// Affinity says what keeps requests together.
type Affinity uint8

// Affinities.
const (
	AffinityNone    Affinity = iota + 1
	AffinitySession          // x-session-affinity, else the body's prompt_cache_key
)

// Route maps requests to a chain of pools.
type Route struct {
	Name           string
	Match          Match
	Dialect        Dialect
	Strategy       Strategy
	ClientStrategy ClientStrategy
	// TrustDeclared believes the max_tokens header alone and skips the body; a
	// fault together with Match.Model.
	TrustDeclared bool
	// DefaultMaxTokens is the output budget of a request that declares none.
	DefaultMaxTokens Tokens // default 512
	Split            Split
	// Affinity says whether requests of one session go to one endpoint while
	// that has room.
	Affinity Affinity
	// Fallback are pools tried after all pools of the split, in order.
	Fallback []string
	Timeouts Timeouts
	// RetryBody is the largest body that can be sent a second time; default 8MiB.
	RetryBody Bytes
	// MaxBody is the largest body accepted; default 64MiB.
	MaxBody Bytes
	// SkipBody keeps Envoy from looking for max_tokens and the like in the body:
	// only headers count.
	SkipBody bool
	// ReadUser makes the body's "user" the session where neither
	// x-session-affinity nor prompt_cache_key is given. It stands in log entries.
	ReadUser bool
	// Generates says which requests make the model generate: those are limited, shed and
	// sent along the chain.
	Generates GeneratingRequests
	// OnFailure says what becomes of requests while ext_proc is dead, when
	// nobody counts limits.
	OnFailure OnFailure
	// Class is how urgent its requests are; a caller may lower it by
	// x-request-class: batch.
	Class RequestClass
	// FairShare keeps a client from more than its share of a pool that is full;
	// default true.
	FairShare bool
	// HoldAtSidecar also bounds, in each sidecar, the requests in flight to each
	// pool of the route; it holds with Fairlead dead. Default false.
	HoldAtSidecar bool
	// MaxOutput is the model's limit on output tokens; 0: unknown.
	MaxOutput Tokens
	// Oversize says what becomes of requests above MaxOutput.
	Oversize Oversize
	// NoRoom says what becomes of requests that no endpoint's KV cache has room
	// for, now or as a whole.
	NoRoom Oversize
	// Unread says what becomes of generating requests whose body Envoy did not read
	// (no content-length, too long, compressed). A header that declares a budget
	// helps only with TrustDeclared.
	Unread Oversize
	// Usage lets Envoy read the tokens used out of answers; default false.
	Usage bool
	// RetryFields says where the retry fields come from that an upstream's 429,
	// 503 or 529 lacks.
	RetryFields RetryFields
}

// OnFailure says what a route does while ext_proc is dead.
type OnFailure uint8

// Choices of OnFailure.
const (
	FailOpen   OnFailure = iota + 1 // requests pass, unlimited
	FailClosed                      // requests are answered 503
)

// GeneratingRequests says which requests of a route make its model generate tokens, of
// those with another method than GET, HEAD, OPTIONS, DELETE or TRACE, and of upgrades.
type GeneratingRequests uint8

// Choices of GeneratingRequests.
const (
	GeneratesPaths GeneratingRequests = iota + 1 // those of which [Generates] is true
	GeneratesAll                                 // all of them
)

// Oversize says what becomes of a request that asks for too much.
type Oversize uint8

// Choices of Oversize.
const (
	OversizeRefuse Oversize = iota + 1 // with what fits
	OversizePass                       // to the server, which may refuse
)

// RetryFields says where missing retry fields come from.
type RetryFields uint8

// Choices of RetryFields.
const (
	RetryFieldsFixed    RetryFields = iota + 1 // one second, put there by Envoy
	RetryFieldsComputed                        // from the answer's own headers and from load; the answer's headers are sent to Fairlead
)

// Match selects requests. Prefix is required; Model, if set, must equal the
// body's top-level "model".
type Match struct {
	Prefix string
	Model  string
	// Connect lets CONNECT requests use this route.
	Connect bool
}

// Timeouts of a route. Zero means none.
type Timeouts struct {
	// FirstToken bounds the wait for response headers of each attempt of a
	// streaming request.
	FirstToken time.Duration
}

// PoolByName returns the pool, or false.
func (c *Config) PoolByName(name string) (Pool, bool) {
	for _, p := range c.Pools {
		if p.Name == name {
			return p, true
		}
	}
	return Pool{}, false
}

// RouteByName returns the route, or false.
func (c *Config) RouteByName(name string) (Route, bool) {
	for _, r := range c.Routes {
		if r.Name == name {
			return r, true
		}
	}
	return Route{}, false
}

// GroupByName returns the group, or false.
func (c *Config) GroupByName(name string) (Group, bool) {
	for _, g := range c.Groups {
		if g.Name == name {
			return g, true
		}
	}
	return Group{}, false
}

// LimitOf returns the limit that a route is subject to: the first that names it,
// else the first that names no route; nil if there is none.
func (c *Config) LimitOf(route string) *Limit {
	var general *Limit
	for i := range c.Limits {
		l := &c.Limits[i]
		if slices.Contains(l.Routes, route) {
			return l
		}
		if len(l.Routes) == 0 && general == nil {
			general = l
		}
	}
	return general
}

// ClientKeyOf returns what a route tells clients apart by, and the claim's name:
// its limit's key, else the authorization header.
func (c *Config) ClientKeyOf(route string) (ClientKey, string) {
	if l := c.LimitOf(route); l != nil {
		return l.Key, l.Claim
	}
	return ClientKeyAuthorization, ""
}
