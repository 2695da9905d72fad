package admin

import "time"

// Proxy is one sidecar as `fairlead proxy-status` shows it.
type Proxy struct {
	Node      string    `json:"node"`
	Group     string    `json:"group"`
	Listen    string    `json:"listen"`
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since"`
	// LastSeen is when it was connected last.
	LastSeen time.Time `json:"last_seen"`
	// Reason is why one that left is refused: its group is not in the configuration.
	Reason string      `json:"reason,omitempty"`
	Types  []ProxyType `json:"types"`
}

// ProxyType is the state of one resource type at one sidecar.
type ProxyType struct {
	Type string `json:"type"` // CDS, EDS, LDS, RDS, RTDS
	// State is SYNCED (everything sent is acknowledged), STALE (sent and not
	// answered yet) or NACKED (refused; Reason says why).
	State   string    `json:"state"`
	Reason  string    `json:"reason,omitempty"`
	LastAck time.Time `json:"last_ack,omitzero"`
}

// Fleet is what Fairlead knows of all pools at one moment.
type Fleet struct {
	At time.Time `json:"at"`
	// Plan is the digest of the plan in force, "" before the first.
	Plan string `json:"plan"`
	Tick uint64 `json:"tick"`
	// Compiled is when that plan was made.
	Compiled time.Time `json:"compiled,omitzero"`
	Scorer   string    `json:"scorer"`
	// Model identifies the trained model in force: the first digits of its
	// file's SHA-256; "" where the formula scores.
	Model string `json:"model,omitempty"`
	Pools []Pool `json:"pools"`
	Nodes []Node `json:"nodes"`
}

// Node is one machine: those with the same `node` in the config, else the host
// of their address.
type Node struct {
	Name string `json:"name"`
	// Ready is true when an endpoint on it has telemetry young enough to judge,
	// none of them is out for a fault of its GPU, and its agent, where its pool
	// takes pushed telemetry, is connected. Why says what is missing.
	Ready bool   `json:"ready"`
	Why   string `json:"why,omitempty"`
	// Agent is nil where no agent has pushed.
	Agent *Agent `json:"agent,omitempty"`
}

// Agent is what the node's agent last said.
type Agent struct {
	Connected bool   `json:"connected"`
	Epoch     uint32 `json:"epoch"`
	// FrameAge is the age of its newest frame in seconds.
	FrameAge float64 `json:"frame_age_s"`
	Frames   uint64  `json:"frames"`
	// Dropped are frames that the agent dropped because it was behind.
	Dropped uint64 `json:"dropped"`
	// Refused are endpoints of its newest frame that serve does not take (at most
	// 8 are counted; Error says why), Rejected values that could not be true.
	Refused  int    `json:"refused_endpoints"`
	Rejected uint64 `json:"rejected_values"`
	Error    string `json:"error,omitempty"`
	GPUs     []GPU  `json:"gpus"`
}

// GPU is one GPU, or one MIG instance, of a node with an agent.
type GPU struct {
	ID        string `json:"id"`
	Profile   string `json:"profile,omitempty"`
	Model     string `json:"model,omitempty"`
	Condition string `json:"condition"`
	XID       int    `json:"xid"`
}

// Pool is one pool of a Fleet.
type Pool struct {
	Name     string `json:"name"`
	Tier     string `json:"tier"`
	Model    string `json:"model,omitempty"`
	Hardware string `json:"hardware,omitempty"`
	// Risk5s and Allocation5s are for scaling: mean and deviation over the last
	// 5 s of the pool's mean risk, and of its KV growth in shares of capacity per
	// second.
	Risk5s       Summary    `json:"risk_5s"`
	Allocation5s Summary    `json:"allocation_5s"`
	Endpoints    []Endpoint `json:"endpoints"`
	// Limit is how many requests the pool can well have in flight: the sum of its
	// endpoints' limits, less their risk, changing slowly.
	Limit float64 `json:"limit"`
	// Levels are the burst levels, by output budget.
	Levels []Level `json:"levels"`
	// Clients is how many callers have requests in flight here or were refused of
	// late. Share is how many requests an interactive one of weight 1 may have in
	// flight (a batch one a quarter of that, either times its weight), −1 while there
	// is enough for all; Caller.Share is what a certain one may.
	Clients int     `json:"clients"`
	Share   float64 `json:"share"`
}

// Level is one burst level of a pool: requests by their output budget, 0 … 7 for
// <10, <64, <128, <256, <512, <1024, ≤2048 and >2048 tokens.
type Level struct {
	Level    int `json:"level"`
	InFlight int `json:"in_flight"`
	// Budget is how many it may have in flight while the pool is full, −1 while it
	// is not.
	Budget float64 `json:"budget"`
	// QueueMillis is how long a request that comes now would wait for a place of the
	// budget, 0 while it is not backlogged.
	QueueMillis float64 `json:"queue_ms"`
	// Backlogged is true when it is at its budget in a full pool, or close to it while
	// more wait than would fill it: requests of the next larger level then go to idle
	// endpoints first.
	Backlogged bool `json:"backlogged"`
}

// Caller is what one client has of one pool, of the clients that have most of it.
type Caller struct {
	Pool string `json:"pool"`
	// Client is "sha256:" and the first 32 hex digits of its hash: of an
	// authorization header's value as it is usually spelt ("Bearer sk-…"); of
	// anything else that clients are told apart by, of its name (address, jwt, mtls,
	// as in the config's limits[].key), a zero byte and the value. It is "others" for
	// clients that there was no room to tell apart.
	Client string `json:"client"`
	// Class is empty for a credential of a client that is told apart by something else:
	// then nothing but Away and Waiting is known.
	Class string `json:"class"`
	// InFlight counts requests in flight, Waiting those that were refused and told
	// when to come back.
	InFlight int `json:"in_flight"`
	Waiting  int `json:"waiting"`
	// Share is how many requests it may have in flight while the pool is full, −1
	// while it is not.
	Share float64 `json:"share"`
	// Early is how many came back before they were told to, of late: of those whose
	// x-stainless-retry-count says that they come back. Others can't be told from
	// further requests; each that is refused and given a slot is one of Waiting.
	Early float64 `json:"early"`
	// Away is for how many seconds it is kept out of the pool yet, since a server there
	// told it alone to stay away (by a 429 for a limit of its key); 0 if it isn't. Clients
	// that are told apart by something else than credentials are so by each of these, which
	// has a row of its own.
	Away float64 `json:"away_seconds"`
}

// Scaling are an endpoint's slow signals.
type Scaling struct {
	KVUsage Summary `json:"kv_usage"`
	Waiting Summary `json:"waiting"`
	// Allocation is in shares of the KV cache per second.
	Allocation Summary `json:"allocation"`
}

// Summary is a mean with its population standard deviation; N is how many
// values it rests on.
type Summary struct {
	Mean      float64 `json:"mean"`
	Deviation float64 `json:"deviation"`
	N         int     `json:"n"`
}

// Endpoint is one endpoint of a Pool.
type Endpoint struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	Node    string `json:"node,omitempty"`
	Zone    string `json:"zone,omitempty"`
	// Risk is the last raw score, 0 … 1; Known is false when there is none.
	Risk  float64 `json:"risk"`
	Known bool    `json:"risk_known"`
	State string  `json:"state"`
	// Why says what the state or weight rests on.
	Why string `json:"why,omitempty"`
	// Weight is relative to the pool; Share is its part of the pool's new
	// requests, 0 … 1.
	Weight   float64 `json:"weight"`
	Share    float64 `json:"share"`
	InFlight int32   `json:"in_flight"`
	// Limit is how many it may have in flight. Closed is true while it told
	// callers to stay away, Failing while its last attempts failed: then it takes one
	// request at a time where others of a chain can serve.
	Limit   int32 `json:"limit"`
	Closed  bool  `json:"closed,omitempty"`
	Failing bool  `json:"failing,omitempty"`
	// ClosedFor is for how many seconds it is Closed yet; then one request asks there
	// first. 0 if it isn't.
	ClosedFor float64 `json:"closed_seconds,omitempty"`
	// Attempts5s and Errors5s count attempts that ended in the last 5 s, by
	// Envoy's access log, and those of them that failed.
	Attempts5s int `json:"attempts_5s"`
	Errors5s   int `json:"errors_5s"`
	// HeaderMillis is the mean time to response headers over the last 5 s, −1
	// when none came. It is not the time to the first token.
	HeaderMillis float64 `json:"headers_ms"`
	// TelemetryAge is the age of the model server's numbers in seconds, −1
	// before the first; GPUAge that of the GPU page's.
	TelemetryAge float64 `json:"telemetry_age_s"`
	GPUAge       float64 `json:"gpu_age_s"`
	// Awaited is how long an endpoint whose telemetry is configured has been
	// waited for, in seconds, while it has never told a number; else 0.
	Awaited float64 `json:"telemetry_awaited_s,omitempty"`
	// TelemetryError is why the last scrape failed, "" if it did not.
	TelemetryError string `json:"telemetry_error,omitempty"`
	// KVUsage is the share of the KV cache in use, 0 … 1; Running and Waiting are
	// the model server's requests. −1 where it tells no such number.
	KVUsage float64 `json:"kv_usage"`
	Running float64 `json:"running"`
	Waiting float64 `json:"waiting"`
	// Allocation is the memory allocation rate over 1 s, in shares of the KV
	// cache per second; AllocationMB the same in MB/s where the cache's size in
	// bytes is known. −1 when unknown.
	Allocation   float64 `json:"allocation_per_s"`
	AllocationMB float64 `json:"allocation_mb_per_s"`
	// Scaling are signals over the last 5 s for sizing the pool.
	Scaling Scaling `json:"scaling_5s"`
	// Condition is what the GPUs' level signals say: ok, drain, eject, lost or
	// unknown; XID the last code, 0 for none.
	Condition string `json:"gpu_condition"`
	XID       int    `json:"xid"`
}

// Split is the division of one route's requests among pools.
type Split struct {
	Route string `json:"route"`
	// File is the config's own split; Effective what is published.
	File      []Weight `json:"file"`
	Effective []Weight `json:"effective"`
	// ByHand is true when Effective was set by `rollout set`.
	ByHand bool      `json:"by_hand"`
	Since  time.Time `json:"since,omitzero"`
}

// Weight is one arm of a Split, in the order of the draw.
type Weight struct {
	Pool string `json:"pool"`
	// Weight is as given; BasisPoints as published, of 10,000.
	Weight      uint32 `json:"weight"`
	BasisPoints uint32 `json:"basis_points"`
}

// SetSplit is the body of PUT /api/v1/splits/{route}. Pools left out keep their
// present weight.
type SetSplit struct {
	Weights map[string]uint32 `json:"weights"`
}

// Problem is the body of every answer that is not a success.
type Problem struct {
	Error string `json:"error"`
}
