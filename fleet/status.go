package fleet

import "net/http"

// StatusOverloaded is what Anthropic's API answers when its shared capacity is used
// up.
const StatusOverloaded = 529

// TurnsAway reports whether a server's status says that it took no request for want
// of room: too many requests, unavailable, overloaded. Such answers may tell when to
// come again.
func TurnsAway(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable || status == StatusOverloaded
}
