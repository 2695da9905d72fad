package main

import (
	"fmt"
	"path/filepath"
	"time"
)

// profile writes a CPU profile of each server under the same load, for
// go tool pprof.
func profile(w *world, dir string, rate float64, d time.Duration) error {
	for _, p := range pieces {
		server := w.servers[p.setup]
		if server == nil || p.body > smallBody {
			continue
		}
		l := w.load(p)
		if _, err := l.run(rate, warmUp); err != nil {
			return err
		}
		file, err := filepath.Abs(filepath.Join(dir, p.name+".pprof"))
		if err != nil {
			return err
		}
		if _, err := server.ask("profile " + file); err != nil {
			return err
		}
		before, err := server.usage()
		if err != nil {
			return err
		}
		r, err := l.run(rate, d)
		if err != nil {
			return err
		}
		after, err := server.usage()
		if err != nil {
			return err
		}
		if _, err := server.ask("profile"); err != nil {
			return err
		}
		u, n := after.since(before), float64(r.sent)
		fmt.Printf("%s: per request %.1f µs CPU (the profiler's own included), %.2f context switches, %.2f writes; p50 %v\n",
			file, float64(u.cpu.Nanoseconds())/1e3/n, float64(u.switches)/n, float64(u.writes)/n, r.p50)
	}
	return nil
}
