// Package pushv1 owns the wire format between node agents and `fairlead serve`:
// push.proto and the Go code generated from it. Nothing in it is written by
// hand but the .proto file and this comment.
package pushv1

//go:generate go run ../../../internal/protogen push.proto
