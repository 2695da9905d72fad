package integration

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// steadyLoad sends short requests at a steady pace from a few workers until it
// is stopped, half of them over kept connections, and remembers every failure.
type steadyLoad struct {
	stop    chan struct{}
	workers sync.WaitGroup
	mu      sync.Mutex
	sent    int
	failed  []string
	by      map[string]int // answers by the text the upstream gives
}

// startLoad begins a load of about perSecond requests on each address.
func startLoad(t *testing.T, perSecond int, addresses ...string) *steadyLoad {
	t.Helper()
	l := &steadyLoad{stop: make(chan struct{}), by: map[string]int{}}
	for _, address := range addresses {
		for worker := range 2 {
			transport := &http.Transport{DisableKeepAlives: worker == 0}
			c := &http.Client{Transport: transport, Timeout: 20 * time.Second}
			l.workers.Go(func() {
				defer transport.CloseIdleConnections()
				l.run(c, "http://"+address+"/v1/chat/completions", 2*time.Second/time.Duration(perSecond))
			})
		}
	}
	t.Cleanup(func() { l.end() })
	return l
}

func (l *steadyLoad) run(c *http.Client, url string, every time.Duration) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-ticker.C:
			l.one(c, url)
		}
	}
}

func (l *steadyLoad) one(c *http.Client, url string) {
	request, err := http.NewRequest(http.MethodPost, url, strings.NewReader(`{"model":"m","max_tokens":16}`))
	if err != nil {
		panic(err) // a constant URL
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := c.Do(request)
	text, status := "", 0
	if err == nil {
		var body []byte
		body, err = io.ReadAll(response.Body) // an answer that breaks off has failed
		_ = response.Body.Close()
		text, status = string(body), response.StatusCode
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent++
	if err != nil || status != http.StatusOK {
		l.failed = append(l.failed, fmt.Sprintf("%s: status %d, %v, %.200q", time.Now().Format("05.000"), status, err, text))
	}
	if err == nil {
		l.by[text]++
	}
}

// end stops the load and waits for its last answers.
func (l *steadyLoad) end() {
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.workers.Wait()
}

// counts returns how many were sent, and the answers by text so far.
func (l *steadyLoad) counts() (sent int, by map[string]int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	by = map[string]int{}
	for k, v := range l.by {
		by[k] = v
	}
	return l.sent, by
}

// mustNotFail ends the load and fails the test if any request failed.
func (l *steadyLoad) mustNotFail(t *testing.T) {
	t.Helper()
	l.end()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.failed) > 0 {
		t.Errorf("%d of %d requests failed, the first: %s", len(l.failed), l.sent, l.failed[0])
	}
	if l.sent == 0 {
		t.Error("the load sent nothing")
	}
	t.Logf("%d requests, %d failed", l.sent, len(l.failed))
}
