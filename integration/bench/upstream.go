package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// Requests and answers are read and written by hand: what the tools themselves
// cost is taken from the same two cores.

// answerBody is a short completion.
const answerBody = `{"id":"chatcmpl-1","object":"chat.completion","model":"m","choices":[{"index":0,"message":` +
	`{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":12,"completion_tokens":1}}`

var answer = fmt.Appendf(nil, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", len(answerBody), answerBody)

// upstreams answer every request at once with 200 and a short JSON body.
type upstreams struct {
	addresses []netip.AddrPort
	listeners []net.Listener
	running   sync.WaitGroup
	mu        sync.Mutex
	open      map[net.Conn]bool
}

func startUpstreams(n int) (*upstreams, error) {
	u := &upstreams{open: map[net.Conn]bool{}}
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			u.close()
			return nil, err
		}
		u.listeners = append(u.listeners, l)
		u.addresses = append(u.addresses, l.Addr().(*net.TCPAddr).AddrPort())
		u.running.Go(func() { u.accept(l) })
	}
	return u, nil
}

func (u *upstreams) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return // closed
		}
		u.mu.Lock()
		u.open[c] = true
		u.mu.Unlock()
		u.running.Go(func() {
			u.serve(c)
			u.mu.Lock()
			delete(u.open, c)
			u.mu.Unlock()
			_ = c.Close()
		})
	}
}

func (u *upstreams) serve(c net.Conn) {
	r := bufio.NewReaderSize(c, 64<<10)
	for {
		if _, err := readMessage(r); err != nil {
			return
		}
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}

func (u *upstreams) close() {
	for _, l := range u.listeners {
		_ = l.Close()
	}
	u.mu.Lock()
	for c := range u.open {
		_ = c.Close()
	}
	u.mu.Unlock()
	u.running.Wait()
}

var (
	contentLength = []byte("content-length:")
	strategy      = []byte(wire.HeaderRouteStrategy + ":")
	dynamic       = []byte(fleet.StrategyDynamic.String())
	errChunked    = errors.New("a message without content-length")
)

// message is what there is to know of an HTTP/1.1 message.
type message struct {
	status  int  // 0 for a request
	steered bool // it names the strategy of a request that was decided about
}

// readMessage reads one HTTP/1.1 message with a content-length to its end.
func readMessage(r *bufio.Reader) (m message, err error) {
	line, err := r.ReadSlice('\n')
	if err != nil {
		return m, err
	}
	if rest, ok := bytes.CutPrefix(line, []byte("HTTP/1.1 ")); ok && len(rest) >= 3 {
		if m.status, err = strconv.Atoi(string(rest[:3])); err != nil {
			return m, err
		}
	}
	length := -1
	for {
		if line, err = r.ReadSlice('\n'); err != nil {
			return m, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			break
		}
		if value, ok := valueOf(line, contentLength); ok {
			if length, err = strconv.Atoi(string(value)); err != nil {
				return m, err
			}
		} else if value, ok := valueOf(line, strategy); ok {
			m.steered = bytes.Equal(value, dynamic)
		}
	}
	if length < 0 {
		return m, errChunked
	}
	_, err = r.Discard(length)
	return m, err
}

// valueOf returns the value of a header line if it has the given name, which ends
// in a colon.
func valueOf(line, name []byte) (value []byte, ok bool) {
	if len(line) < len(name) || !bytes.EqualFold(line[:len(name)], name) {
		return nil, false
	}
	return bytes.TrimSpace(line[len(name):]), true
}
