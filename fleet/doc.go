// Package fleet owns Fairlead's vocabulary (pools, endpoints, routes, groups,
// splits, burst levels, risk, outcomes) and its configuration file: loading,
// defaults, validation, JSON Schema.
//
// Everything here is a value. A [Config] that came out of [Load] or [Parse] is
// complete and valid and is never written again; nobody validates it twice.
package fleet
