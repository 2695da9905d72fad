package envoytest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// connectionWindowDefault is HTTP/2's initial connection window in bytes (RFC
// 9113 §6.9.2); only WINDOW_UPDATE frames change it.
const connectionWindowDefault = 65535

// ClientSettings is what one HTTP/2 client told about itself.
type ClientSettings struct {
	// Values holds the SETTINGS of the client's first frame.
	Values map[http2.SettingID]uint32
	// ConnectionWindow is the default plus the WINDOW_UPDATEs of stream 0 that
	// came before the first request's headers.
	ConnectionWindow int64
}

// SettingsRecorder is an HTTP/2 server in clear that answers every request with
// an empty 200 and records what each connection's client announced.
type SettingsRecorder struct {
	tb    testing.TB
	l     net.Listener
	wg    sync.WaitGroup
	mu    sync.Mutex
	open  map[net.Conn]bool
	seen  []ClientSettings
	ended bool
}

// NewSettingsRecorder starts a recorder on a free loopback port; it ends in
// Cleanup.
func NewSettingsRecorder(tb testing.TB) *SettingsRecorder {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	s := &SettingsRecorder{tb: tb, l: l, open: make(map[net.Conn]bool)}
	s.wg.Go(s.accept)
	tb.Cleanup(s.Close)
	return s
}

// Addr is where it listens.
func (s *SettingsRecorder) Addr() netip.AddrPort { return netip.MustParseAddrPort(s.l.Addr().String()) }

// Seen returns one entry per connection that has sent a request, in order of
// the first request.
func (s *SettingsRecorder) Seen() []ClientSettings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]ClientSettings(nil), s.seen...)
}

// Close ends the recorder and its connections.
func (s *SettingsRecorder) Close() {
	s.mu.Lock()
	s.ended = true
	for c := range s.open {
		_ = c.Close()
	}
	s.mu.Unlock()
	_ = s.l.Close()
	s.wg.Wait()
}

func (s *SettingsRecorder) accept() {
	for {
		c, err := s.l.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.ended {
			s.mu.Unlock()
			_ = c.Close()
			return
		}
		s.open[c] = true
		s.mu.Unlock()
		s.wg.Go(func() {
			if err := s.serve(c); !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				s.tb.Logf("settings recorder: %v", err)
			}
			_ = c.Close()
			s.mu.Lock()
			delete(s.open, c)
			s.mu.Unlock()
		})
	}
}

// serve answers until the connection ends and returns why it did.
func (s *SettingsRecorder) serve(c net.Conn) error {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(c, preface); err != nil {
		return err
	}
	if string(preface) != http2.ClientPreface {
		return fmt.Errorf("client preface: found %q", preface)
	}
	framer := http2.NewFramer(c, c)
	if err := framer.WriteSettings(); err != nil {
		return err
	}
	told := ClientSettings{Values: make(map[http2.SettingID]uint32), ConnectionWindow: connectionWindowDefault}
	requests := 0
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return err
		}
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if f.IsAck() {
				continue
			}
			_ = f.ForeachSetting(func(v http2.Setting) error {
				told.Values[v.ID] = v.Val
				return nil
			})
			err = framer.WriteSettingsAck()
		case *http2.WindowUpdateFrame:
			if f.StreamID == 0 && requests == 0 {
				told.ConnectionWindow += int64(f.Increment)
			}
		case *http2.PingFrame:
			if !f.IsAck() {
				err = framer.WritePing(true, f.Data)
			}
		case *http2.HeadersFrame:
			if requests++; requests == 1 {
				s.mu.Lock()
				s.seen = append(s.seen, told)
				s.mu.Unlock()
			}
			err = answerEmpty(framer, f.StreamID)
		}
		if err != nil {
			return err
		}
	}
}

func answerEmpty(framer *http2.Framer, stream uint32) error {
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	_ = encoder.WriteField(hpack.HeaderField{Name: ":status", Value: "200"})
	return framer.WriteHeaders(http2.HeadersFrameParam{
		StreamID: stream, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true,
	})
}
