package serve

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long a file must be quiet before it is read: editors and
// config-map updates write in several steps.
const settle = 100 * time.Millisecond

// watchFile calls changed after the file at path may have changed, until ctx
// ends. It watches the folder, so that replacement by rename or by a swapped
// symbolic link is seen too.
func watchFile(ctx context.Context, path string, changed func()) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch %s: %w", path, err)
	}
	defer watcher.Close()
	if err := watcher.Add(filepath.Dir(path)); err != nil {
		return fmt.Errorf("watch %s: %w", filepath.Dir(path), err)
	}
	quiet := time.NewTimer(settle)
	quiet.Stop()
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-watcher.Events:
			if !open {
				return nil
			}
			quiet.Reset(settle)
		case err, open := <-watcher.Errors:
			if !open {
				return nil
			}
			return fmt.Errorf("watch %s: %w", path, err)
		case <-quiet.C:
			changed()
		}
	}
}
