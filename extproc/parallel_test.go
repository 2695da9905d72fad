package extproc_test

import (
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// nothing is what a decision sees that comes before every other's reservation.
type nothing struct{}

func (nothing) InFlight(uint32) int32 { return 0 }

// TestExactlyAsManyEnterAsMay: 200 requests at a time over gRPC, in front of five
// endpoints with ten places each, with the real ledger; also where decisions see none of
// what is in flight, so that the ledger alone keeps the limits.
func TestExactlyAsManyEnterAsMay(t *testing.T) {
	t.Run("decisions see the counts", func(t *testing.T) { exactlyAsManyEnter(t, false) })
	t.Run("decisions see nothing in flight", func(t *testing.T) { exactlyAsManyEnter(t, true) })
}

func exactlyAsManyEnter(t *testing.T, blind bool) {
	ledger := accesslog.NewLedger(time.Now)
	in := plan.Inputs{
		Pools: []plan.PoolInput{{Name: "h100", Tier: "h100"}},
		Routes: []plan.RouteInput{{Name: "chat", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic,
			ClientStrategy: fleet.ClientStrategyHonor, DefaultBudget: 512, Split: []string{"h100"}}},
	}
	for i := range 5 {
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + i)}), 8000)
		in.Pools[0].Endpoints = append(in.Pools[0].Endpoints, plan.EndpointInput{
			Address: at, Weight: float64(1 + i), MaxInFlight: 10, KVFree: -1, State: fleet.StateNeutral,
			Slot: ledger.Slot(fleet.EndpointKey{Pool: "h100", Address: at}),
		})
	}
	p, err := plan.Compile(in)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := extproc.NewIDs(1, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	live := plan.Live(ledger)
	if blind {
		live = nothing{}
	}
	service := extproc.New(extproc.Options{Plan: func() *plan.Plan { return p }, Live: live, Ledger: ledger, IDs: ids})
	client := extprocv3.NewExternalProcessorClient(serve(t, service))
	attributes, err := structpb.NewStruct(map[string]any{wire.AttributeRouteName: "chat", wire.AttributeClusterName: "h100"})
	if err != nil {
		t.Fatal(err)
	}
	request := &extprocv3.ProcessingRequest{
		Request:    &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{}}},
		Attributes: map[string]*structpb.Struct{wire.AttributesKey: attributes},
	}
	var entered, refused atomic.Int32
	var all sync.WaitGroup
	start := make(chan struct{})
	for range 200 {
		all.Go(func() {
			<-start
			stream, err := client.Process(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			if err := stream.Send(request); err != nil {
				t.Error(err)
				return
			}
			switch r, err := stream.Recv(); {
			case err != nil:
				t.Error(err)
			case r.GetImmediateResponse() != nil:
				refused.Add(1)
			default:
				entered.Add(1)
			}
		})
	}
	close(start)
	all.Wait()
	if entered.Load() != 50 || refused.Load() != 150 || ledger.Total() != 50 {
		t.Errorf("%d entered, %d refused, %d counted; want 50, 150, 50", entered.Load(), refused.Load(), ledger.Total())
	}
	for _, e := range ledger.Snapshot() {
		if e.Attempts != 10 {
			t.Errorf("%v has %d; want 10", e.Endpoint, e.Attempts)
		}
	}
}

func serve(t *testing.T, service *extproc.Service) *grpc.ClientConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(extproc.ServerOptions()...)
	service.Register(g)
	var running sync.WaitGroup
	running.Go(func() { _ = g.Serve(l) })
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		g.Stop()
		running.Wait()
	})
	return conn
}
