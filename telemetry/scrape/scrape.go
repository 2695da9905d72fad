package scrape

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// Target is one endpoint to poll.
type Target struct {
	Endpoint fleet.EndpointKey
	// EngineURL is the model server's page.
	EngineURL string
	// GPUURL is the GPU exporter's page, or "" for none.
	GPUURL string
	// GPUs selects series of the GPU page by UUID or its beginning, or one MIG
	// instance by UUID, "/" and its GPU_I_ID; empty means all GPUs of the page.
	// Series without a UUID speak for the node and count for every endpoint.
	GPUs []string
	// H2C polls the engine page by HTTP/2 with prior knowledge.
	H2C bool
	// Interval between two scrapes of a page.
	Interval time.Duration
}

func (t Target) equal(o Target) bool {
	return t.Endpoint == o.Endpoint && t.EngineURL == o.EngineURL && t.GPUURL == o.GPUURL &&
		slices.Equal(t.GPUs, o.GPUs) && t.H2C == o.H2C && t.Interval == o.Interval
}

// Targets are the endpoints of those pools whose telemetry is scraped.
func Targets(pools []fleet.Pool) []Target {
	var out []Target
	for _, p := range pools {
		if p.Telemetry.Source != fleet.TelemetryScrape {
			continue
		}
		for _, e := range p.Endpoints {
			t := Target{
				Endpoint:  fleet.EndpointKey{Pool: p.Name, Address: e.Address},
				EngineURL: "http://" + e.Address.String() + p.Telemetry.EnginePath,
				GPUs:      e.GPUs,
				H2C:       p.Protocol == fleet.H2C,
				Interval:  p.Telemetry.Interval,
			}
			if p.Telemetry.GPUPath != "" {
				host := e.Address
				if p.Telemetry.GPUPort != 0 {
					host = netip.AddrPortFrom(e.Address.Addr(), p.Telemetry.GPUPort)
				}
				t.GPUURL = "http://" + host.String() + p.Telemetry.GPUPath
			}
			out = append(out, t)
		}
	}
	return out
}

const (
	defaultInterval = 200 * time.Millisecond
	// slowest is the longest deadline of a scrape and the longest back-off, and
	// how old GPU numbers may be to go into a sample: XID and power change once
	// a second at most.
	slowest = time.Second
	// defaultMaxBody is twenty times a usual vLLM page of 200 kB.
	defaultMaxBody = 4 << 20
)

// Options of a Scraper. The zero value is usable.
type Options struct {
	// Client fetches all pages; nil means own clients that keep connections
	// alive, follow no redirects, use no proxy and ask for plain text: unpacking
	// gzip costs more than twice the CPU of reading a page.
	Client *http.Client
	// MaxBody is the largest page accepted, in bytes; default 4 MiB.
	MaxBody int64
}

// Counters count since the Scraper was made.
type Counters struct {
	Scrapes  uint64 // pages asked for
	Failures uint64 // pages not had: refused, late, not 200, too large
	BadLines uint64 // wanted lines that could not be read
	Rejected uint64 // numbers outside their range
	// Frozen counts GPUs left out of a page because their energy counter had
	// stood still: a hung exporter, or one that collects too seldom.
	Frozen uint64
	// Dropped counts series of GPUs beyond the 256 that a page may name, or whose
	// names and UUIDs are longer than any GPU's.
	Dropped uint64
}

// Scraper polls targets. It implements [telemetry.Source].
type Scraper struct {
	h1, h2  *http.Client
	own     bool
	maxBody int64

	scrapes, failures, badLines, rejected, frozen, dropped atomic.Uint64

	mu      sync.Mutex
	targets []Target
	workers map[fleet.EndpointKey]*worker
	running bool
	run     context.Context // of the Run in progress while it starts workers, else nil
	wg      sync.WaitGroup
	ready   chan delivery // unbuffered: a worker waits until its reading is taken
}

// New returns a Scraper of these targets. Of targets with the same endpoint the
// last one counts.
func New(targets []Target, o Options) *Scraper {
	s := &Scraper{h1: o.Client, h2: o.Client, maxBody: o.MaxBody, targets: slices.Clone(targets)}
	if s.maxBody <= 0 {
		s.maxBody = defaultMaxBody
	}
	if o.Client == nil {
		s.own = true
		s.h1, s.h2 = newClient(false), newClient(true)
	}
	return s
}

func newClient(h2c bool) *http.Client {
	var protocols http.Protocols
	protocols.SetHTTP1(!h2c)
	protocols.SetUnencryptedHTTP2(h2c)
	return &http.Client{
		Transport: &http.Transport{
			Protocols:           &protocols,
			DialContext:         (&net.Dialer{Timeout: slowest}).DialContext,
			DisableCompression:  true,
			MaxIdleConnsPerHost: 2, // engine page and GPU page may share a host
			IdleConnTimeout:     30 * time.Second,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Counters returns the counts so far.
func (s *Scraper) Counters() Counters {
	return Counters{
		Scrapes: s.scrapes.Load(), Failures: s.failures.Load(),
		BadLines: s.badLines.Load(), Rejected: s.rejected.Load(),
		Frozen: s.frozen.Load(), Dropped: s.dropped.Load(),
	}
}

// SetTargets replaces the targets. Those that stay the same keep their
// connections, phase and back-off; of a removed one no further delivery begins
// once SetTargets has returned. It may be called at any time.
func (s *Scraper) SetTargets(targets []Target) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.targets = slices.Clone(targets)
	if s.run != nil {
		s.reconcile()
	}
}

// Run polls until ctx ends and returns its cause. It calls out from its own
// goroutine only. It is an error to call Run while another Run is going on.
func (s *Scraper) Run(ctx context.Context, out func(telemetry.Reading)) error {
	s.mu.Lock()
	if s.running {
		s.mu.Unlock()
		return errors.New("scraper is already running")
	}
	s.running = true
	s.run, s.ready = ctx, make(chan delivery)
	s.workers = make(map[fleet.EndpointKey]*worker, len(s.targets))
	s.reconcile()
	s.mu.Unlock()

	s.deliver(ctx, out)
	s.mu.Lock()
	s.run, s.workers = nil, nil
	s.mu.Unlock()
	s.wg.Wait()
	s.mu.Lock()
	s.running = false
	s.mu.Unlock()
	if s.own {
		s.h1.CloseIdleConnections()
		s.h2.CloseIdleConnections()
	}
	return context.Cause(ctx)
}

// reconcile starts and stops workers until they match the targets. s.mu is
// held.
func (s *Scraper) reconcile() {
	wanted := make(map[fleet.EndpointKey]Target, len(s.targets))
	for _, t := range s.targets {
		if t.Interval <= 0 {
			t.Interval = defaultInterval
		}
		wanted[t.Endpoint] = t
	}
	for key, w := range s.workers {
		if t, ok := wanted[key]; !ok || !t.equal(w.target) {
			w.cancel()
			delete(s.workers, key)
		}
	}
	for key, t := range wanted {
		if _, ok := s.workers[key]; ok {
			continue
		}
		ctx, cancel := context.WithCancel(s.run)
		w := &worker{target: t, cancel: cancel, ready: s.ready}
		s.workers[key] = w
		s.wg.Go(func() { s.pollEngine(ctx, w) })
		if t.GPUURL != "" {
			s.wg.Go(func() { s.pollGPU(ctx, w) })
		}
	}
}

// worker is the state of one target while it is polled.
type worker struct {
	target Target
	cancel context.CancelFunc
	ready  chan<- delivery
	last   *telemetry.Sample // newest one with engine numbers; owned by pollEngine
	steps  float64           // of the engine's loop at last; owned by pollEngine

	mu  sync.Mutex
	gpu telemetry.Sample // newest numbers of the GPU page
}

type delivery struct {
	from    *worker
	reading telemetry.Reading
}

// deliver hands readings on until ctx ends. A reading whose worker was stopped
// in the meantime is dropped.
func (s *Scraper) deliver(ctx context.Context, out func(telemetry.Reading)) {
	for {
		select {
		case <-ctx.Done():
			return
		case d := <-s.ready:
			s.mu.Lock()
			current := s.workers[d.from.target.Endpoint] == d.from
			s.mu.Unlock()
			if current {
				out(d.reading)
			}
		}
	}
}

// send waits until the reading is taken or ctx ends.
func (w *worker) send(ctx context.Context, sample telemetry.Sample, err error) {
	r := telemetry.Reading{Endpoint: w.target.Endpoint, Sample: sample, Err: err}
	select {
	case w.ready <- delivery{w, r}:
	case <-ctx.Done():
	}
}

// pollEngine polls the engine page and delivers one reading per round. If the
// page fails while the GPU page answers, a second reading carries what the GPU
// says: an XID explains a dead engine.
func (s *Scraper) pollEngine(ctx context.Context, w *worker) {
	client := s.h1
	if w.target.H2C {
		client = s.h2
	}
	p := s.newPage(client, w.target.EngineURL)
	s.poll(ctx, w.target, w.target.EngineURL, func() error {
		err := p.fetch(ctx, w.target.Interval)
		sample, steps := telemetry.Sample{At: time.Now()}, w.steps
		if err == nil {
			read := readEngine(p.buf)
			s.count(read.stats, read.rejected)
			read.fill(&sample)
			steps = read.steps()
			if !sample.Known.HasEngine() {
				err = fmt.Errorf("scrape %s: %w", w.target.EngineURL, errNothingKnown)
			}
		}
		if err != nil {
			w.send(ctx, telemetry.Sample{}, err)
		}
		w.addGPU(&sample)
		if err != nil && sample.Known == 0 {
			return err
		}
		sample.Settle(w.last)
		if sample.Known.HasEngine() {
			if steps != w.steps {
				sample.Changed = sample.At
			}
			w.last, w.steps = &sample, steps
		}
		w.send(ctx, sample, nil)
		return err
	})
}

// errNothingKnown is of a page that answers and says nothing: another program's,
// an engine that is starting, or numbers that can't be true.
var errNothingKnown = errors.New("no usable number of a model server on the page")

// pollGPU polls the GPU page and keeps what it said for the next reading.
func (s *Scraper) pollGPU(ctx context.Context, w *worker) {
	p, gpus := s.newPage(s.h1, w.target.GPUURL), newGPUPage(w.target.GPUs)
	s.poll(ctx, w.target, w.target.GPUURL, func() error {
		if err := p.fetch(ctx, w.target.Interval); err != nil {
			return err
		}
		sample := telemetry.Sample{At: time.Now()}
		sample.SetGPUs(gpus.read(p.buf, sample.At))
		s.count(gpus.stats, gpus.rejected)
		s.frozen.Add(uint64(gpus.frozen))
		s.dropped.Add(uint64(gpus.dropped))
		w.mu.Lock()
		w.gpu = sample
		w.mu.Unlock()
		return nil
	})
}

func (s *Scraper) count(st Stats, rejected int) {
	s.badLines.Add(uint64(st.Bad))
	s.rejected.Add(uint64(rejected))
}

// addGPU copies the GPU's numbers into a sample while they are young.
func (w *worker) addGPU(s *telemetry.Sample) {
	w.mu.Lock()
	g := w.gpu
	w.mu.Unlock()
	if g.Known != 0 && s.At.Sub(g.At) <= max(slowest, 2*w.target.Interval) {
		s.TakeGPU(&g)
	}
}

// poll calls scrape on a fixed grid of the target's interval until ctx ends.
// The grid's phase comes from the URL, so that a fleet's scrapes spread evenly
// and the same target has the same phase in every run. After failures rounds
// are left out: 1, 2, 4, … intervals up to a second.
func (s *Scraper) poll(ctx context.Context, t Target, url string, scrape func() error) {
	next := time.Now().Add(phase(url, t.Interval))
	timer := time.NewTimer(time.Until(next))
	defer timer.Stop()
	wait := t.Interval
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if scrape() == nil {
			wait = t.Interval
		} else {
			wait = max(t.Interval, min(2*wait, slowest))
		}
		next = next.Add(wait)
		// Behind by more than a round: leave out what was missed, keep the grid.
		if late := time.Since(next); late > 0 {
			next = next.Add((late/t.Interval + 1) * t.Interval)
		}
		timer.Reset(time.Until(next))
	}
}

// phase is a target's fixed offset inside its interval.
func phase(url string, interval time.Duration) time.Duration {
	h := fnv.New64a()
	_, _ = io.WriteString(h, url)
	return time.Duration(h.Sum64() % uint64(interval))
}

// page fetches one URL again and again, with one buffer.
type page struct {
	scraper *Scraper
	client  *http.Client
	url     string
	buf     []byte // the page, after a fetch that succeeded
}

func (s *Scraper) newPage(c *http.Client, url string) *page {
	return &page{scraper: s, client: c, url: url}
}

// fetch gets the page within min(2 intervals, 1 s).
func (p *page) fetch(ctx context.Context, interval time.Duration) error {
	p.scraper.scrapes.Add(1)
	ctx, cancel := context.WithTimeout(ctx, min(2*interval, slowest))
	defer cancel()
	if err := p.get(ctx); err != nil {
		p.scraper.failures.Add(1)
		return fmt.Errorf("scrape %s: %w", p.url, err)
	}
	return nil
}

func (p *page) get(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "text/plain;version=0.0.4")
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		// A short answer read to its end keeps the connection usable.
		_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
		return fmt.Errorf("status %d, want 200", resp.StatusCode)
	}
	return p.readBody(resp.Body)
}

// readBody fills buf, growing it as needed up to the limit.
func (p *page) readBody(body io.Reader) error {
	limit := int(p.scraper.maxBody)
	p.buf = p.buf[:0]
	for {
		if len(p.buf) == cap(p.buf) {
			p.buf = slices.Grow(p.buf, max(16<<10, cap(p.buf)))
		}
		n, err := body.Read(p.buf[len(p.buf):cap(p.buf)])
		p.buf = p.buf[:len(p.buf)+n]
		if len(p.buf) > limit {
			p.buf = nil
			return fmt.Errorf("page is larger than %d bytes", limit)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
