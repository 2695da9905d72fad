package fleet

import (
	"fmt"
	"net/netip"
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
	Model    string // informative
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
	// SpillAt is the share of the capacity of a zone's endpoints from which
	// requests of that zone's sidecars go to other zones too; default 0.7.
	SpillAt float64
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
}

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
