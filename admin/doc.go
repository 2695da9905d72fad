// Package admin serves Fairlead's HTTP side: health, metrics and the JSON API
// that the operator commands read. It owns the shapes of that API and who may
// call it; it computes nothing and holds no state.
//
// The API has no credentials of its own. It listens on loopback unless the
// config says `plaintext: true`. On loopback it refuses requests whose Host is
// another (a web page that rebinds its name to loopback cannot reach it), and it
// takes changes only as application/json, which a cross-origin form cannot send.
package admin
