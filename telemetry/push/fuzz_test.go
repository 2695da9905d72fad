package push

import (
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// FuzzFrames takes two messages of one stream from arbitrary bytes: nothing
// panics, and what is delivered is in range, however it came.
func FuzzFrames(f *testing.F) {
	now := time.Now()
	seed := func(first, second *pushv1.Frame) {
		a, err := proto.Marshal(first)
		if err != nil {
			f.Fatal(err)
		}
		b, err := proto.Marshal(second)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(a, b)
	}
	usual := full(2, now)
	usual.Node = "n"
	var e encoder
	seed(e.encode(&usual, 1, 0, now), e.encode(&usual, 2, 3, now))
	seed(&pushv1.Frame{Node: "n"}, &pushv1.Frame{Sequence: 1, Inventory: &pushv1.Inventory{}, Gpus: []*pushv1.GPU{{Index: 7}}})
	f.Add([]byte{}, []byte{0xff})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		var last time.Time
		r := &receiver{server: NewServer(ServerOptions{Log: quietLog, Deliver: func(x telemetry.Reading) {
			s := x.Sample
			for i := range sampleFields {
				field := &sampleFields[i]
				v := *field.at(&s)
				if s.Known.Has(field.bit) && !(v >= field.min && v <= field.max) || !s.Known.Has(field.bit) && v != 0 {
					t.Errorf("%s is %v, known %b", field.wire, v, s.Known)
				}
			}
			if s.XID < 0 || s.XID > maxXID || s.Condition > telemetry.ConditionLost || x.Err == nil && s.At.Before(last) {
				t.Errorf("sample %+v after %v", s, last)
			}
			if x.Err == nil {
				last = s.At
				if age := time.Since(s.At); age < 0 || age > maxAge+time.Minute || s.Changed.After(s.At) {
					t.Errorf("age %v, changed %v after the sample", age, s.Changed.Sub(s.At))
				}
			}
		}})}
		r.server.SetPools([]fleet.Pool{pool("a", endpoint("10.23.45.67:8000", ""))})
		for _, raw := range [][]byte{first, second} {
			var m pushv1.Frame
			if len(raw) > maxMessage || proto.Unmarshal(raw, &m) != nil {
				continue
			}
			ack, err := r.take(&m)
			if err != nil {
				return
			}
			if len(ack.GetRefused()) > maxRefusals || len(ack.GetError()) > 3*maxText {
				t.Errorf("answer %v", ack)
			}
			if _, err := proto.Marshal(ack); err != nil {
				t.Errorf("answer cannot be written: %v", err)
			}
		}
		for _, n := range r.server.Nodes() {
			if len(n.GPUs) > maxGPUs || len(n.Endpoints) > maxEndpoints || len(n.Refused) > maxRefusals || len(n.Err) > maxText {
				t.Errorf("node %+v", n)
			}
			for i := range n.GPUs {
				g := &n.GPUs[i]
				for j := range gpuFields {
					if v := *gpuFields[j].at(g); math.IsNaN(v) || math.IsInf(v, 0) || v != 0 && !g.Known.Has(gpuFields[j].bit) {
						t.Errorf("GPU %+v", g)
					}
				}
			}
		}
	})
}
