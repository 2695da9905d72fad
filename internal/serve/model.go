package serve

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/scorer/xgb"
)

// Scorers that --scorer names.
const (
	ScorerFormula = "formula"
	ScorerXGB     = "xgb"
)

// maxModelFile bounds what is read of a model file; xgb refuses what is larger.
const maxModelFile = xgb.MaxSize

// scoringModel is a risk model and the digest of its file, "" for the formula.
type scoringModel struct {
	scorer.Model
	digest string
}

// loadModel returns the model that the flags ask for: the formula, the trained
// model that comes with the program, or the one in a file.
func loadModel(name, file string) (scoringModel, error) {
	switch name {
	case "", ScorerFormula:
		if file != "" {
			return scoringModel{}, errors.New("a model file together with the scorer formula; accepted: a file together with --scorer xgb")
		}
		return scoringModel{Model: scorer.Formula(scorer.FormulaOptions{})}, nil
	case ScorerXGB:
	default:
		return scoringModel{}, fmt.Errorf("scorer %q; accepted: %s, %s", name, ScorerFormula, ScorerXGB)
	}
	var trees *xgb.Model
	var err error
	if file == "" {
		trees, err = xgb.Shipped()
	} else {
		trees, err = ReadModel(file)
	}
	if err != nil {
		return scoringModel{}, err
	}
	model, err := xgb.Risk(trees, ScorerXGB)
	if err != nil {
		return scoringModel{}, fmt.Errorf("model %s: %w", orShipped(file), err)
	}
	return scoringModel{Model: model, digest: trees.Info().Digest[:12]}, nil
}

func orShipped(file string) string {
	if file == "" {
		return "that comes with the program"
	}
	return file
}

// ReadModel reads and loads a model file. What is no regular file is refused: a
// pipe would never end, and a device has no size.
func ReadModel(file string) (*xgb.Model, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe without a writer would block
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("model %s: found a %s; accepted: a regular file", file, kindOf(info.Mode()))
	}
	data, err := io.ReadAll(io.LimitReader(f, maxModelFile+1))
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if len(data) > maxModelFile {
		return nil, fmt.Errorf("model %s: more than %d bytes; accepted: at most that", file, maxModelFile)
	}
	trees, err := xgb.Load(data, xgb.LoadOptions{})
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", file, err)
	}
	return trees, nil
}

func kindOf(m os.FileMode) string {
	switch {
	case m.IsDir():
		return "directory"
	case m&os.ModeNamedPipe != 0:
		return "pipe"
	case m&os.ModeDevice != 0:
		return "device"
	}
	return "special file"
}

// reloadModel reads the model file again. A faulty file changes nothing: the
// last good model goes on.
func (s *Server) reloadModel() {
	model, err := loadModel(s.scorer, s.modelPath)
	s.modelRefused.Store(err != nil)
	if err != nil {
		s.metrics.models.add("refused", 1)
		s.log.Error("model not taken; the last good one goes on", "file", s.modelPath, "error", err)
		return
	}
	s.metrics.models.add("taken", 1)
	s.scoring.setModel(model)
	s.log.Info("model taken", "file", s.modelPath, "digest", model.digest)
}
