package xds

import (
	"sync"

	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// maxRuntimeNames bounds how many runtime layers are answered.
const maxRuntimeNames = 64

// extras answers for the types that Fairlead has no content for. Without a
// cache for a type, go-control-plane closes the whole ADS stream each time an
// Envoy asks for it, and that Envoy is never configured.
type extras struct {
	caches map[string]*cache.LinearCache

	mu       sync.Mutex
	runtimes map[string]bool
}

func newExtras() *extras {
	e := &extras{caches: map[string]*cache.LinearCache{}, runtimes: map[string]bool{}}
	for _, t := range []string{
		resource.SecretType, resource.RuntimeType, resource.ScopedRouteType, resource.VirtualHostType,
		resource.ExtensionConfigType, resource.ThriftRouteType, resource.RateLimitConfigType,
	} {
		e.caches[t] = cache.NewLinearCache(t)
	}
	return e
}

// watch answers a request for a type without content. A subscription to a type
// that is not known here is never answered, which leaves the stream open.
func (e *extras) watch(r *cache.DeltaRequest, sub cache.Subscription, out chan cache.DeltaResponse) (func(), error) {
	c := e.caches[r.GetTypeUrl()]
	if c == nil {
		return nil, nil
	}
	if r.GetTypeUrl() == resource.RuntimeType {
		if err := e.emptyRuntimes(sub.SubscribedResources()); err != nil {
			return nil, err
		}
	}
	return c.CreateDeltaWatch(r, sub, out)
}

// emptyRuntimes makes sure that each named runtime layer exists: an Envoy with
// an RTDS layer asks for nothing else until that layer has come.
func (e *extras) emptyRuntimes(names map[string]struct{}) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for name := range names {
		if e.runtimes[name] || len(e.runtimes) >= maxRuntimeNames {
			continue
		}
		layer := &runtimev3.Runtime{Name: name, Layer: &structpb.Struct{}}
		if err := e.caches[resource.RuntimeType].UpdateResource(name, layer); err != nil {
			return err
		}
		e.runtimes[name] = true
	}
	return nil
}
