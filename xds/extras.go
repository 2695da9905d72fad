package xds

import (
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
)

// extras answers for the types that Fairlead has no content for. Without a
// cache for a type, go-control-plane closes the whole ADS stream each time an
// Envoy asks for it, and that Envoy is never configured.
type extras struct {
	caches map[string]*cache.LinearCache
}

func newExtras() *extras {
	e := &extras{caches: map[string]*cache.LinearCache{}}
	for _, t := range []string{
		resource.SecretType, resource.ScopedRouteType, resource.VirtualHostType,
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
	return c.CreateDeltaWatch(r, sub, out)
}
