package envoy

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	jwtv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/jwt_authn/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// Names inside the token filter: the issuer, and what routes require.
const (
	jwtProvider    = "issuer"
	jwtRequirement = "token"
)

// transportSocket is TLS towards callers. Envoy reads the files when it builds
// the listener, and not again when they change: it watches directories only for
// certificates that come over SDS (measured on Envoy 1.40.0). Where callers must
// show a certificate, one that the authority did not sign ends the handshake.
func transportSocket(t *fleet.ListenerTLS) *corev3.TransportSocket {
	if t == nil {
		return nil
	}
	common := &tlsv3.CommonTlsContext{
		TlsCertificates: []*tlsv3.TlsCertificate{{
			CertificateChain: fileSource(t.Certificate),
			PrivateKey:       fileSource(t.Key),
		}},
		AlpnProtocols: []string{"h2", "http/1.1"},
	}
	context := &tlsv3.DownstreamTlsContext{CommonTlsContext: common}
	if t.ClientCA != "" {
		common.ValidationContextType = &tlsv3.CommonTlsContext_ValidationContext{
			ValidationContext: &tlsv3.CertificateValidationContext{TrustedCa: fileSource(t.ClientCA)},
		}
		context.RequireClientCertificate = wrapperspb.Bool(true)
	}
	return &corev3.TransportSocket{
		Name:       "envoy.transport_sockets.tls",
		ConfigType: &corev3.TransportSocket_TypedConfig{TypedConfig: packed(context)},
	}
}

func fileSource(path string) *corev3.DataSource {
	return &corev3.DataSource{Specifier: &corev3.DataSource_Filename{Filename: path}}
}

// knowsCertificates reports whether callers of a listener have shown a
// certificate.
func knowsCertificates(l fleet.Listener) bool { return l.TLS != nil && l.TLS.ClientCA != "" }

// tokens verifies tokens on the routes that require it, and leaves the payload
// where ext_proc sees it. The request goes on with its token, since a model
// server may ask for it too. Tokens in a query parameter, which Envoy would take
// otherwise, end up in logs.
//
// Envoy reads the keys when it builds the listener, and not again when the file
// changes: watching its directory has no effect here (measured on Envoy 1.40.0).
func tokens(j *fleet.JWT) *jwtv3.JwtAuthentication {
	return &jwtv3.JwtAuthentication{
		Providers: map[string]*jwtv3.JwtProvider{jwtProvider: {
			Issuer:              j.Issuer,
			Audiences:           j.Audiences,
			JwksSourceSpecifier: &jwtv3.JwtProvider_LocalJwks{LocalJwks: fileSource(j.JWKS)},
			FromHeaders:         []*jwtv3.JwtHeader{{Name: "Authorization", ValuePrefix: "Bearer "}},
			Forward:             true,
			PayloadInMetadata:   wire.KeyClaims,
		}},
		RequirementMap: map[string]*jwtv3.JwtRequirement{jwtRequirement: {
			RequiresType: &jwtv3.JwtRequirement_ProviderName{ProviderName: jwtProvider},
		}},
		// A browser's preflight carries no token.
		BypassCorsPreflight: true,
	}
}

// requiresToken makes a route refuse requests without a valid token.
func requiresToken() *anypb.Any {
	return packed(&jwtv3.PerRouteConfig{
		RequirementSpecifier: &jwtv3.PerRouteConfig_RequirementName{RequirementName: jwtRequirement},
	})
}
