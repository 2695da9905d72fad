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
	errChunked    = errors.New("a message without content-length")
)

// readMessage reads one HTTP/1.1 message with a content-length to its end and
// returns its status, 0 for a request.
func readMessage(r *bufio.Reader) (status int, err error) {
	line, err := r.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	if rest, ok := bytes.CutPrefix(line, []byte("HTTP/1.1 ")); ok && len(rest) >= 3 {
		if status, err = strconv.Atoi(string(rest[:3])); err != nil {
			return 0, err
		}
	}
	length := -1
	for {
		if line, err = r.ReadSlice('\n'); err != nil {
			return status, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			break
		}
		if len(line) > len(contentLength) && bytes.EqualFold(line[:len(contentLength)], contentLength) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(line[len(contentLength):]))); err != nil {
				return status, err
			}
		}
	}
	if length < 0 {
		return status, errChunked
	}
	_, err = r.Discard(length)
	return status, err
}
