package ratelimit

import (
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// narrow leaves a replica that was not asked yet room for so many clients.
func narrow(clients int, all ...*replica) {
	for _, m := range all {
		m.seen = newTable(clients)
		m.seen.accounts = true
	}
}

// inPlace is one of the clients of a place.
func inPlace(place, i int) admission.LimitKey {
	return admission.LimitKey{Limit: "l", Client: admission.Client{byte(place), byte(i), byte(i >> 8), 1}}
}

// TestMadeUpClientsMakeABoundedNumberOfKeys: each replica has room for 64, and the others
// are counted in 32 places, each with a ledger of each replica.
func TestMadeUpClientsMakeABoundedNumberOfKeys(t *testing.T) {
	const room = 2 * shards
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address()}, 2)
	narrow(room, all...)
	up(t, all...)
	r := requests(10, calm())
	admitted := [2]int{}
	var wg sync.WaitGroup
	for i, m := range all {
		wg.Go(func() {
			for n := range 2000 { // the same ones at both
				if m.Reserve(client(strconv.Itoa(n)), r, 0, time.Now()).Admitted {
					admitted[i]++
				}
			}
		})
	}
	wg.Wait()
	keys, err := strconv.Atoi(s.MustDo(t, "DBSIZE"))
	if err != nil {
		t.Fatal(err)
	}
	probes := len(all) * 2 // they live for a second
	if most := len(all)*2*room + shards*(1+len(all)) + probes; keys > most {
		t.Errorf("%d keys of 2000 clients at %d replicas; want %d at most", keys, len(all), most)
	}
	// Both have room for the same 64, and what was shared is counted together.
	if got, want := admitted[0]+admitted[1], 2*room+10*shards; got != want {
		t.Errorf("%d admitted; want %d", got, want)
	}
	for i, m := range all {
		if c := m.Counters(); c.Sharing != shards || c.Errors != 0 {
			t.Errorf("replica %d: %d counts are shared, want %d; %+v", i, c.Sharing, shards, c)
		}
	}
}

// TestClientsThatShareACountGetEachRemainingValueOnce, of several replicas, and the limit
// exactly. Those that came before are counted by themselves.
func TestClientsThatShareACountGetEachRemainingValueOnce(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address()}, 3)
	narrow(shards, all...)
	up(t, all...)
	r := admission.Rates{Requests: per(100, calm()), Tokens: per(1_000_000, calm())}
	const place = 7
	for _, m := range all {
		m.Reserve(inPlace(place, 0), r, 1, time.Now())
	}
	var told ledger
	var wg sync.WaitGroup
	for i, m := range all {
		wg.Go(func() {
			for n := range 200 {
				a := m.Reserve(inPlace(place, 1+(n+i)%50), r, 10, time.Now())
				told.add(a)
				if a.Admitted {
					m.Settle(a.Ticket, 3)
				}
			}
		})
	}
	wg.Wait()
	if n := told.admitted(t); n != 100 {
		t.Errorf("%d admitted of 100", n)
	}
	expect(t, all[0].Reserve(inPlace(place, 0), r, 1, time.Now()), admission.ReasonAdmitted, 96)
	eventually(t, "all is settled where it was reserved", func() bool {
		_, tokens := sharedCount(t, s, place, r)
		return tokens == 3*100
	})
}

// sharedCount is what the server holds of the count of a place.
func sharedCount(t *testing.T, s *redisbin.Server, place int, r admission.Rates) (requests, tokens int64) {
	t.Helper()
	k := key{limit: "l", client: admission.Client{byte(place)}, requests: r.Requests.Window, tokens: r.Tokens.Window}
	count, _ := k.redisNames(0, true)
	var ends [2]int64
	value := s.MustDo(t, "GET", count)
	if n, err := fmt.Sscan(value, &ends[0], &requests, &ends[1], &tokens); n != 4 {
		t.Fatalf("%s: %q: %v", count, value, err)
	}
	return requests, tokens
}

// TestWhatSharingClientsDidAloneIsToldOfTheirCount, and settled there, though another
// replica counts one of them by itself.
func TestWhatSharingClientsDidAloneIsToldOfTheirCount(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address(), Deadline: lateness}, 2)
	m, other := all[0], all[1]
	narrow(shards, m)
	up(t, all...)
	r := admission.Rates{Requests: per(100, calm()), Tokens: per(1000, calm())}
	const place = 9
	m.Reserve(inPlace(place, 0), r, 1, time.Now())
	expect(t, other.Reserve(inPlace(place, 1), r, 5, time.Now()), admission.ReasonAdmitted, 99)
	expect(t, m.Reserve(inPlace(place, 1), r, 20, time.Now()), admission.ReasonAdmitted, 99)
	s.Pause()
	var alone []admission.Reservation
	for i := range 3 {
		a := m.Reserve(inPlace(place, 1+i), r, 20, time.Now())
		if !a.Local || !a.Admitted {
			t.Fatalf("%+v", a)
		}
		alone = append(alone, a)
	}
	m.Settle(alone[0].Ticket, 10) // before the server is told of it
	down(t, m, nil)
	unasked := m.Reserve(inPlace(place, 1), r, 20, time.Now())
	if !unasked.Local || !unasked.Admitted {
		t.Fatalf("%+v", unasked)
	}
	s.Resume()
	up(t, m)
	last := m.Reserve(inPlace(place, 2), r, 20, time.Now())
	expect(t, last, admission.ReasonAdmitted, 94)
	m.Settle(alone[1].Ticket, 10)
	m.Settle(unasked.Ticket, 10)
	m.Settle(last.Ticket, 10)
	eventually(t, "all is settled", func() bool {
		requests, tokens := sharedCount(t, s, place, r)
		return requests == 6 && tokens == 20+10+10+20+10+10
	})
	if requests, tokens := counted(t, s, inPlace(place, 1), r); requests != 1 || tokens != 5 {
		t.Errorf("%d requests and %d tokens of the client's own count; want what the other replica put there, 1 and 5", requests, tokens)
	}
}
