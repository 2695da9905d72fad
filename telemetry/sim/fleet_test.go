package sim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// startFleet runs servers on loopback until the test ends.
func startFleet(t *testing.T, servers ...ServerConfig) *Fleet {
	t.Helper()
	f, err := New(&Config{Seed: 1, Servers: servers}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return f
}

// client speaks HTTP/1.1, or HTTP/2 with prior knowledge.
func client(t *testing.T, h2c bool) *http.Client {
	var protocols http.Protocols
	protocols.SetHTTP1(!h2c)
	protocols.SetUnencryptedHTTP2(h2c)
	transport := &http.Transport{Protocols: &protocols}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func url(s *Server, path string) string { return "http://" + s.Addr().String() + path }

// eventually waits for something that other goroutines bring about.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 30 s", what)
		}
	}
}

func TestOnePortSpeaksHTTP1AndH2C(t *testing.T) {
	s := startFleet(t, testConfig(t)).Servers()[0]
	for _, h2c := range []bool{false, true} {
		resp, err := client(t, h2c).Post(url(s, "/v1/chat/completions"), "application/json", strings.NewReader(chatBody(`,"stream":true,"max_tokens":20`)))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || (resp.ProtoMajor == 2) != h2c || !strings.HasSuffix(string(body), "data: [DONE]\n\n") {
			t.Errorf("h2c %v: got %s, %q, %v", h2c, resp.Proto, body, err)
		}
	}
	eventually(t, "rest", func() bool { return s.Stats().Running == 0 && s.Stats().KVUsage == 0 })
}

func TestHeadersComeBeforeTheFirstToken(t *testing.T) {
	cfg := testConfig(t)
	s := startFleet(t, cfg)
	if err := s.Inject("h100-1", NewFault(XID, 0, 0)); err != nil { // the engine stands still
		t.Fatal(err)
	}
	resp, err := client(t, false).Post(url(s.Servers()[0], "/v1/chat/completions"), "application/json", strings.NewReader(chatBody(`,"stream":true`)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" {
		t.Fatalf("got %d %v", resp.StatusCode, resp.Header)
	}
}

func TestAClientThatGoesAwayFreesItsSequence(t *testing.T) {
	s := startFleet(t, testConfig(t)).Servers()[0]
	for _, h2c := range []bool{false, true} {
		for _, stream := range []string{"true", "false"} {
			ctx, cancel := context.WithCancel(t.Context())
			r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url(s, "/v1/chat/completions"),
				strings.NewReader(chatBody(`,"max_tokens":100000,"ignore_eos":true,"stream":`+stream)))
			var sent sync.WaitGroup
			sent.Go(func() {
				if resp, err := client(t, h2c).Do(r); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			})
			eventually(t, "a running request", func() bool { return s.Stats().Running == 1 })
			cancel()
			eventually(t, "its end", func() bool { return s.Stats().Running == 0 && s.Stats().KVUsage == 0 })
			sent.Wait()
		}
	}
	if st := s.Stats(); st.Aborted != 4 {
		t.Fatalf("%d aborted; want 4", st.Aborted)
	}
}

func TestCrashResetsConnectionsAndTheServerComesBack(t *testing.T) {
	f := startFleet(t, testConfig(t))
	s := f.Servers()[0]
	resp, err := client(t, false).Post(url(s, "/v1/chat/completions"), "application/json", strings.NewReader(chatBody(`,"max_tokens":100000,"ignore_eos":true,"stream":true`)))
	if err != nil {
		t.Fatal(err)
	}
	events := bufio.NewReader(resp.Body)
	if _, err := events.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	addr := s.Addr()
	if err := f.Inject("h100-1", NewFault(Crash, 0, 500*time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, events); err == nil {
		t.Error("a stream of a crashed server ended as if complete")
	}
	resp.Body.Close()
	eventually(t, "a refused connection", func() bool {
		conn, err := net.Dial("tcp", addr.String())
		if err == nil {
			conn.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	eventually(t, "the server's return", func() bool {
		resp, err := client(t, false).Get(url(s, "/health"))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
	if s.Addr() != addr {
		t.Fatalf("it came back on %s; want %s", s.Addr(), addr)
	}
}

func TestTheEndOfRunCutsStreams(t *testing.T) {
	f, err := New(&Config{Servers: []ServerConfig{testConfig(t)}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	for _, h2c := range []bool{false, true} {
		resp, err := client(t, h2c).Post(url(f.Servers()[0], "/v1/chat/completions"), "application/json", strings.NewReader(chatBody(`,"max_tokens":100000,"ignore_eos":true,"stream":true`)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestAPortInUseIsNamed(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	free, busy := testConfig(t), testConfig(t)
	busy.Name, busy.Listen = "h100-2", netip.MustParseAddrPort(taken.Addr().String())
	f, err := New(&Config{Servers: []ServerConfig{free, busy}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = f.Run(t.Context())
	want := fmt.Sprintf(`listen for server "h100-2" on %s`, taken.Addr())
	if err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("got %v; want %q in it", err, want)
	}
}

func TestInjectNamesTheServersItKnows(t *testing.T) {
	f, err := New(&Config{Servers: []ServerConfig{testConfig(t)}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = f.Inject("h100-9", NewFault(Slow, 0, 0))
	if err == nil || !strings.Contains(err.Error(), `no server is named "h100-9"; accepted: h100-1`) {
		t.Fatalf("got %v", err)
	}
	for range maxFaults {
		if err := f.Inject("h100-1", NewFault(Slow, 0, 0)); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Inject("h100-1", NewFault(Slow, 0, 0)); err == nil {
		t.Fatal("the schedule has no bound")
	}
}

func TestServersDoNotShareTheirFaults(t *testing.T) {
	one, two := testConfig(t), testConfig(t)
	two.Name = "h100-2"
	f := startFleet(t, one, two)
	if err := f.Inject("h100-1", NewFault(OutOfMemory, 0, 0)); err != nil {
		t.Fatal(err)
	}
	c := client(t, false)
	eventually(t, "out of memory", func() bool {
		resp, err := c.Get(url(f.Servers()[0], "/health"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode == 503
	})
	resp, err := c.Get(url(f.Servers()[1], "/health"))
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("the other: %v, %v", resp, err)
	}
	resp.Body.Close()
}
