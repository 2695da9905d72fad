package xds

import "strings"

// EventKind says what happened on an ADS stream or in a group.
type EventKind string

// Event kinds.
const (
	EventConnect    EventKind = "connect"     // a stream was accepted
	EventDisconnect EventKind = "disconnect"  // an accepted stream is over
	EventRefused    EventKind = "refused"     // a stream was turned away
	EventPush       EventKind = "push"        // a response is being sent
	EventAck        EventKind = "ack"         // an Envoy accepted a response
	EventNack       EventKind = "nack"        // an Envoy refused a response
	EventAckTimeout EventKind = "ack_timeout" // an Envoy didn't answer within the deadline
	EventRollback   EventKind = "rollback"    // a group goes back to its last accepted content
)

// Event is one thing that happened. Kind and TypeURL come from small fixed
// sets; Group, Node and Detail may hold anything an outsider sent, cut to 512
// bytes on one line.
type Event struct {
	Kind    EventKind
	TypeURL string // "" where no type is concerned
	Group   string
	Node    string
	Detail  string
}

// maxText bounds what is kept of a text from outside, in bytes. An Envoy's
// refusal quotes the whole failing message, often several kB on many lines.
const maxText = 512

// oneLine joins the lines of s with single spaces and cuts the result to
// maxText bytes at a rune border.
func oneLine(s string) string {
	if len(s) > 16*maxText {
		s = s[:16*maxText]
	}
	s = strings.ToValidUTF8(strings.Join(strings.Fields(s), " "), "?")
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s)
	if len(s) <= maxText {
		return s
	}
	const ellipsis = "…"
	cut := maxText - len(ellipsis)
	for cut > 0 && s[cut]&0xC0 == 0x80 {
		cut--
	}
	return s[:cut] + ellipsis
}

// localCause reports whether a refusal is due to the machine that the Envoy
// runs on, not to the content. Envoy 1.40 writes "cannot bind
// '127.0.0.1:23303': Address already in use".
func localCause(message string) bool {
	m := strings.ToLower(message)
	for _, sign := range []string{"cannot bind", "address already in use"} {
		if strings.Contains(m, sign) {
			return true
		}
	}
	return false
}
