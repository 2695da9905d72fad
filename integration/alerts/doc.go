// Package alerts runs the alert rules of examples/alerts in Prometheus's own
// rule engine. It is a module of its own because that engine brings some three
// hundred packages that nothing else needs; the root module's integration tests
// execute it.
package alerts
