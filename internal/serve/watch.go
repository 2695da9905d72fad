package serve

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// settle is how long a file must be quiet before it is read: editors and
	// config-map updates write in several steps.
	settle = 100 * time.Millisecond
	// patience bounds the wait for quiet.
	patience = time.Second
	// look is how often the file is looked at where no notice comes: its folder
	// was replaced, notices overflowed, or the system grants no watch at all.
	look = 2 * time.Second
)

// watchFile calls changed after the file at path may have changed, until ctx
// ends. It never fails: notices from the file system only make it quick.
func watchFile(ctx context.Context, path string, log *slog.Logger, changed func()) {
	notices, stop := notify(path, log)
	defer stop()
	poll := time.NewTicker(look)
	defer poll.Stop()
	quiet := time.NewTimer(settle)
	quiet.Stop()
	defer quiet.Stop()

	seen := stamp(path)
	var since time.Time // when the first change that was not reported was seen
	for {
		select {
		case <-ctx.Done():
			return
		case <-notices:
		case <-poll.C:
		case <-quiet.C:
			since = time.Time{}
			changed()
			continue
		}
		now := stamp(path)
		if now == seen {
			continue // something else in the folder
		}
		seen = now
		if since.IsZero() {
			since = time.Now()
		}
		quiet.Reset(max(0, min(settle, patience-time.Since(since))))
	}
}

// notify returns a channel that gets a value when something in the file's
// folder changed; it stays silent where the folder can't be watched.
func notify(path string, log *slog.Logger) (notices <-chan fsnotify.Event, stop func()) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		log.Warn("config file is polled: no notices from the file system", "file", path, "error", err)
		return nil, func() {}
	}
	if err := watcher.Add(filepath.Dir(path)); err != nil {
		log.Warn("config file is polled: its folder can't be watched", "file", path, "error", err)
	}
	done := make(chan struct{})
	go func() { // errors (an overflow, say) are made up for by polling
		defer close(done)
		for range watcher.Errors {
		}
	}()
	return watcher.Events, func() {
		_ = watcher.Close() // closes both channels
		<-done
	}
}

// fileStamp tells versions of a file apart without reading it.
type fileStamp struct {
	size     int64
	modified time.Time
	target   string // where symbolic links lead
}

func stamp(path string) fileStamp {
	info, err := os.Stat(path)
	if err != nil {
		return fileStamp{size: -1}
	}
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		target = ""
	}
	return fileStamp{size: info.Size(), modified: info.ModTime(), target: target}
}
