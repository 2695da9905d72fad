package extproc

import (
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

func TestExchangeAnswersAsAStreamDoes(t *testing.T) {
	w := newWorld(t)
	const before = "kept"
	b, err := w.Exchange([]byte(before), typicalMessage(t))
	if err != nil || string(b[:len(before)]) != before {
		t.Fatalf("%q, %v", b, err)
	}
	answer := &extprocv3.ProcessingResponse{}
	if err := proto.Unmarshal(b[len(before):], answer); err != nil {
		t.Fatal(err)
	}
	if headerMap(t, answer.GetRequestHeaders().GetResponse().GetHeaderMutation())[wire.HeaderDecision] == "" {
		t.Errorf("no decision: %v", answer)
	}
	if b, err := w.Exchange(nil, []byte("no message")); err == nil || len(b) != 0 {
		t.Errorf("an unreadable message: answer %q, error %v", b, err)
	}
}
