package agent

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// keepFor is how long a server keeps its GPUs after they could no longer be
// found: long enough for a restart, in which a model server loads its weights
// for minutes and comes back on the same GPUs.
const keepFor = 5 * time.Minute

// assignment is which GPUs one server has.
type assignment struct {
	gpus               []string
	listeners, workers []int
	// why says why there are no GPUs, or why they are not sure; "" if all is
	// well.
	why string
	// confirmed is when the GPUs were last found.
	confirmed time.Time
	// logged is what the log said last.
	logged string
}

// assignments holds them for all servers, in the config's order.
type assignments struct {
	servers []Server
	list    []assignment
	// rows are the ids of the GPUs that selectors were last held against.
	rows []string
	log  *slog.Logger
}

func newAssignments(servers []Server, log *slog.Logger) *assignments {
	a := &assignments{servers: servers, list: make([]assignment, len(servers)), log: log}
	for i := range a.list {
		a.list[i].why = "not looked for yet"
		a.list[i].logged = a.list[i].why
	}
	return a
}

// noGPUs says that there are none to look for.
func (a *assignments) noGPUs() {
	for i := range a.list {
		a.list[i] = assignment{why: "the node has no GPUs by its configuration"}
	}
}

// wantDiscovery reports whether any server's GPUs are not given by hand.
func (a *assignments) wantDiscovery() bool {
	return slices.ContainsFunc(a.servers, func(s Server) bool { return len(s.GPUs) == 0 })
}

// gpusAre takes the ids of the node's GPUs and finds those that the config
// names. GPUs that were found once are kept while one of them is missing.
func (a *assignments) gpusAre(now time.Time, gpus []telemetry.GPU) {
	if slices.EqualFunc(gpus, a.rows, func(g telemetry.GPU, id string) bool { return g.ID == id }) {
		return
	}
	a.rows = a.rows[:0]
	for i := range gpus {
		a.rows = append(a.rows, gpus[i].ID)
	}
	for i, s := range a.servers {
		if len(s.GPUs) == 0 {
			continue
		}
		x := &a.list[i]
		found, why := resolve(s.GPUs, a.rows)
		if x.why = why; why == "" {
			x.gpus, x.confirmed = found, now
		}
		a.tell(i)
	}
}

// resolve returns the ids that selectors select, or why they can't be told.
func resolve(selectors []Selector, ids []string) (found []string, why string) {
	for _, s := range selectors {
		var uuids []string
		for _, id := range ids {
			uuid, instance, _ := strings.Cut(id, "/")
			if strings.HasPrefix(uuid, s.uuid) && (s.instance == "" || s.instance == instance) {
				found, uuids = append(found, id), append(uuids, uuid)
			}
		}
		slices.Sort(uuids)
		switch uuids = slices.Compact(uuids); {
		case len(uuids) == 0:
			return nil, fmt.Sprintf("%s is none of this node's GPUs", s)
		case len(uuids) > 1:
			return nil, fmt.Sprintf("%s begins %d of this node's GPUs; give more of it", s, len(uuids))
		}
	}
	slices.Sort(found)
	return slices.Compact(found), ""
}

// learn takes what discovery found, and the GPUs as they are now. For keepFor a
// server whose GPUs are not found keeps those it had.
//
// Beyond that, and beside what is found, a server that still runs keeps GPUs
// that can't be read, even if its processes are no longer named there: the list
// of a GPU's processes goes with the GPU, and it is then that its condition must
// reach the server.
func (a *assignments) learn(now time.Time, found []Finding, gpus []telemetry.GPU) {
	for i, f := range found {
		if len(a.servers[i].GPUs) > 0 {
			continue
		}
		x := &a.list[i]
		x.why, x.listeners, x.workers = f.Why, f.Listeners, f.Workers
		if x.why != "" && a.instances() {
			x.why += " (DCGM tells no processes of GPUs in MIG mode)"
		}
		restarting := f.Why != "" && now.Sub(x.confirmed) <= keepFor
		kept := slices.DeleteFunc(slices.Clone(x.gpus), func(id string) bool {
			return foundAt(id, found, i) || !restarting && (!f.Same || readable(id, gpus))
		})
		if x.gpus = union(f.GPUs, kept); f.Why == "" {
			x.confirmed = now
		}
		a.tell(i)
	}
}

func union(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}

// readable reports whether a GPU says more than that something is wrong with
// it.
func readable(id string, gpus []telemetry.GPU) bool {
	const alive = telemetry.GPUHasUtil | telemetry.GPUHasGRActive | telemetry.GPUHasFBUsed | telemetry.GPUHasPower
	i := slices.IndexFunc(gpus, func(g telemetry.GPU) bool { return g.ID == id })
	return i >= 0 && !gpus[i].Lost && gpus[i].Known&alive != 0
}

// instances reports whether the node has MIG instances.
func (a *assignments) instances() bool {
	return slices.ContainsFunc(a.rows, func(id string) bool { return strings.Contains(id, "/") })
}

// foundAt reports whether discovery found a GPU at a server other than one.
func foundAt(id string, found []Finding, other int) bool {
	for i, f := range found {
		if i != other && slices.Contains(f.GPUs, id) && !slices.Contains(found[other].GPUs, id) {
			return true
		}
	}
	return false
}

// tell logs a server's GPUs if they are news.
func (a *assignments) tell(i int) {
	x := &a.list[i]
	news := strings.Join(x.gpus, " ") + ";" + x.why
	if news == x.logged {
		return
	}
	x.logged = news
	server := a.servers[i].Listen.String()
	switch {
	case x.why == "":
		a.log.Info("server's GPUs", "server", server, "gpus", x.gpus)
	case len(x.gpus) > 0:
		a.log.Warn("server's GPUs can't be confirmed, the last known are kept", "server", server, "gpus", x.gpus, "reason", x.why)
	default:
		a.log.Warn("server's GPUs are unknown", "server", server, "reason", x.why)
	}
}

// rowsOf returns the rows of these GPUs, appended to rows.
func rowsOf(ids []string, gpus, rows []telemetry.GPU) []telemetry.GPU {
	for i := range gpus {
		if slices.Contains(ids, gpus[i].ID) {
			rows = append(rows, gpus[i])
		}
	}
	return rows
}
