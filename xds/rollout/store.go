package rollout

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// fileName is the state's name inside the state folder.
const fileName = "weights.json"

// Store keeps a [State] as a file in the state folder.
type Store struct{ dir string }

// NewStore returns the store of a state folder, which must exist by the time of
// the first Save.
func NewStore(dir string) Store { return Store{dir: dir} }

// Path is the file.
func (s Store) Path() string { return filepath.Join(s.dir, fileName) }

// Load reads the state; a missing file is the empty state. A file that can't be
// read is an error that names it: weights set by hand are never silently
// dropped.
func (s Store) Load() (State, error) {
	raw, err := os.ReadFile(s.Path())
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("load weights set by hand: %w", err)
	}
	st, err := Decode(raw)
	if err != nil {
		return State{}, fmt.Errorf("load %s: %w; repair it, or remove it to return to the file's splits", s.Path(), err)
	}
	return st, nil
}

// Save writes the state: whole or not at all, with mode 0600, and on disk when
// Save returns.
func (s Store) Save(st State) error {
	if err := s.save(st.Encode()); err != nil {
		return fmt.Errorf("save %s: %w", s.Path(), err)
	}
	return nil
}

func (s Store) save(raw []byte) (err error) {
	f, err := os.CreateTemp(s.dir, fileName+".*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(raw)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), s.Path()); err != nil {
		return err
	}
	return syncDir(s.dir)
}

// syncDir makes a rename durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
