package serve

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Listen takes the state folder and binds all addresses. A port in use is an error that names the address
// and what it was for; what was bound before it is closed again.
func (s *Server) Listen() (err error) {
	cfg := s.config.Load()
	defer func() {
		if err != nil {
			s.closeListeners()
		}
	}()
	if s.lock, err = lockFolder(cfg.Serve.StateDir); err != nil {
		return err
	}
	// Only the folder's owner writes into it.
	if err := s.endSplits(cfg); err != nil {
		return err
	}
	for _, l := range []struct {
		what    string
		address fleet.Address
		to      *net.Listener
	}{
		{"serve.xds", cfg.Serve.XDS, &s.listeners.xds},
		{"serve.extproc", cfg.Serve.ExtProc, &s.listeners.extproc},
		{"serve.accessLog", cfg.Serve.AccessLog, &s.listeners.accessLog},
		{"serve.admin", cfg.Serve.Admin, &s.listeners.admin},
		{"serve.push", cfg.Serve.Push.Address, &s.listeners.push},
	} {
		if l.address == (fleet.Address{}) {
			continue // push, which is optional
		}
		if *l.to, err = listen(l.what, l.address); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) closeListeners() {
	if s.lock != nil {
		_ = s.lock.Close()
	}
	for _, l := range []net.Listener{s.listeners.xds, s.listeners.extproc, s.listeners.accessLog, s.listeners.admin, s.listeners.push} {
		if l != nil {
			_ = l.Close()
		}
	}
}

// listen binds one address. A Unix socket left behind by a dead process is
// removed; one that somebody answers on is not.
func listen(what string, a fleet.Address) (net.Listener, error) {
	if a.Network() == "unix" {
		if err := clearSocket(a.Path); err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
	}
	l, err := net.Listen(a.Network(), a.Target())
	if err != nil {
		return nil, fmt.Errorf("%s: listen on %s: %w", what, a, err)
	}
	if a.Network() == "unix" {
		if err := os.Chmod(a.Path, 0o600); err != nil {
			_ = l.Close()
			return nil, fmt.Errorf("%s: %w", what, err)
		}
	}
	return l, nil
}

func clearSocket(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err != nil {
		return err
	}
	if info.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("listen on unix:%s: there is a file that is no socket", path)
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return fmt.Errorf("listen on unix:%s: address already in use: another process answers there", path)
	}
	return os.Remove(path)
}
