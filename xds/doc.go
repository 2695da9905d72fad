// Package xds serves Envoy its configuration over incremental (delta) ADS.
//
// It owns the way from one desired world ([Target]) to what every Envoy holds:
// the caches, the order of pushes, waiting for ACKs, going back after a
// refusal, and the status of each Envoy. It never decides what the
// configuration is (packages fleet and rollout do) nor how it looks in
// Envoy's terms (package envoy does).
//
// A sidecar belongs to the group that its node.cluster names. Each group has
// its own caches for clusters, endpoints and routes, and one for the listener
// of each listening address. Assignments are built once and shared by all
// groups, but the order "cluster, then its changed assignment" is kept per
// group: in one cache for all groups, the first group to publish would use up
// the change that warms the cluster in the second.
//
// A group's runtime (RTDS) holds what each of its sidecars may have in flight to
// a cluster; see [Server.SetMaxRequests]. It is no part of the world: it is pushed
// alone, waits for nothing, and nothing waits for it.
//
// Invariants, each guarded by a test:
//   - Nothing is published that wasn't built, validated and found closed
//     whole; a faulty Target changes nothing.
//   - A group is never served less than the last world: the first Submit fills
//     the caches before any stream is accepted, and streams of unknown groups
//     are refused with a status instead of an empty world.
//   - Additions go endpoints, clusters, changed assignments, routes, listeners;
//     removals the other way round. A step waits for the ACKs of the one
//     before, at most Options.AckDeadline; who misses it is shown STALE and not
//     waited for again until it caught up.
//   - A cluster that no route needs any longer stays for the time that requests
//     which came under the old routes may take to get to it; see lingerMargin. No
//     other change waits for that, and no Envoy can prolong it.
//   - Only what changed is sent: a change of weights is one route response per
//     Envoy, and a restart with the same content sends nothing, since versions
//     are hashes of deterministically marshalled content.
//   - Content that several Envoys of a group (or its only one) refuse is taken
//     back at once and isn't sent again until Submit brings other content.
//   - A runtime is there, if only empty, before the first stream: an Envoy with
//     an RTDS layer asks for nothing else before. An Envoy that comes back with a
//     runtime keeps it until the others are back and have been counted.
//   - A message handed to a cache is never written again.
package xds
