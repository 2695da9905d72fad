package envoyproc

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestOutputKeepsOnlyTheLastLines(t *testing.T) {
	o := newOutput(nil, true)
	for i := range 3 * maxLines {
		fmt.Fprintf(o, "line %d\n", i)
	}
	got := o.lines()
	if len(got) != maxLines || got[0] != fmt.Sprintf("line %d", 2*maxLines) || got[maxLines-1] != fmt.Sprintf("line %d", 3*maxLines-1) {
		t.Errorf("kept %d lines, %q to %q", len(got), got[0], got[len(got)-1])
	}
}

func TestOutputMemoryIsBoundedWithoutLineEnds(t *testing.T) {
	o := newOutput(nil, true)
	chunk := bytes.Repeat([]byte("x"), 4096)
	for range 1000 {
		_, _ = o.Write(chunk)
	}
	if len(o.partial) > maxPartial {
		t.Errorf("holds %d bytes of an unfinished line, limit %d", len(o.partial), maxPartial)
	}
	for _, line := range o.lines() {
		if len(line) > maxLineLen {
			t.Errorf("kept a line of %d bytes, limit %d", len(line), maxLineLen)
		}
	}
}

func TestOutputHidesInfoLinesButSeesTheMark(t *testing.T) {
	var shown bytes.Buffer
	o := newOutput(&shown, true)
	text := "[2026-01-01 00:00:00.000][7][info][main] [server.cc:1] starting main dispatch loop\n" +
		"[2026-01-01 00:00:00.000][7][warning][main] [server.cc:1] look here\nplain text"
	for _, b := range []byte(text) { // however the pipe cuts it
		_, _ = o.Write([]byte{b})
	}
	o.flush()
	select {
	case <-o.running:
	default:
		t.Error("running mark not seen")
	}
	if got := shown.String(); strings.Contains(got, "info") || !strings.Contains(got, "look here") || !strings.HasSuffix(got, "plain text\n") {
		t.Errorf("shown:\n%s", got)
	}
}

func TestParseStatSurvivesOddCommandNames(t *testing.T) {
	line := "42 (a) b (c)) S 1 42 42 0 -1 4194304 100 0 0 0 150 25 0 0 20 0 3 0 12345 1000 200 18446744073709551615"
	user, system, err := parseStat(line, 100)
	if err != nil || user != 1500*time.Millisecond || system != 250*time.Millisecond {
		t.Errorf("got %v %v %v", user, system, err)
	}
	for _, bad := range []string{"", "42 (x) S 1", "42 (x) S 1 2 3 4 5 6 7 8 9 10 a b c d e"} {
		if _, _, err := parseStat(bad, 100); err == nil {
			t.Errorf("parseStat(%q): no error", bad)
		}
	}
}
