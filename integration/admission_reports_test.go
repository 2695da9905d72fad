package integration

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// knownReport is a fault that was reported of another gateway, balancer or SDK,
// with the tests that show that Fairlead doesn't have it.
type knownReport struct {
	id, report, fault string
	tests             []string // folder.TestName
}

// knownReports are those about requests, bodies, answers and limits. Reports on
// failover between providers, on translation between dialects (a fallback that
// grows a body, a rewritten body's stale content-encoding), on canaries, xDS and
// telemetry are not admission's.
var knownReports = []knownReport{
	{"H1", "envoy #43708", "a decision from the body was not followed", []string{"integration.TestUpstreamHitIsTheLoggedDecision"}},
	{"H2", "envoy #47081", "an upgrade with a buffered body hangs", []string{"integration.TestUpgradeWithABodyIsAnswered"}},
	{"H3", "envoy #47048", "a WebSocket with a streamed body hangs", []string{"integration.TestUpgradesPassWithFairleadAlive", "integration.TestFactTunnelsWithJSONContentTypePass"}},
	{"H4", "envoy #45220", "a missing ext_proc cluster lets everything pass: nothing is published that names one, and serve doesn't start", []string{"envoy.TestClosureFindsWhatIsMissing", "xds.TestNothingWithoutTheExtProcClusterIsPublished", "xds.TestStreamsThatCannotBeServedAreRefusedWithAReason"}},
	{"H6", "envoy #36982, agentgateway #905", "a caller's routing header survives", []string{"integration.TestSpoofedHeadersNeverReachAnUpstream", "integration.TestAnswersCarryTheContract"}},
	{"H8", "envoy #38291, ai-gateway #721", "content-length dropped", []string{"integration.TestBodyCorpus", "integration.TestLargeBodiesPassWithAReason"}},
	{"H9", "ai-gateway #839", "hop-by-hop headers of a chunked body reach the next target", []string{"integration.TestChunkedBodyFallsBackWhole"}},
	{"H11", "gateway-api-inference-extension PR #3033", "answers to Envoy out of order", []string{"extproc.FuzzProcess", "extproc.TestOtherMessagesGetTheMatchingEmptyAnswer"}},
	{"H12", "gateway-api-inference-extension PR #477, #726", "trailers unanswered or answered wrongly", []string{"integration.TestRequestsWithTrailersAreAnswered", "extproc.TestOtherMessagesGetTheMatchingEmptyAnswer"}},
	{"H14", "ai-gateway #1209, #805", "bodies from 640 KB on are answered 500", []string{"integration.TestLargeBodiesPassWithAReason", "integration.TestBodiesOverTheRoutesLimitAreRefusedInBothDialects"}},
	{"H16", "llm-d #1582", "2,000 streams overflow the ext_proc cluster", []string{"integration.TestTwoThousandStreamsDontOverflow"}},
	{"H17", "ai-gateway #965", "preflights fail", []string{"integration.TestWhatDoesNotGenerateIsNeverLimited", "integration.TestHeadAndOptionsPass"}},
	{"H18", "router-for-me/CLIProxyAPI #2929", "HEAD is answered unlike GET", []string{"integration.TestHeadAndOptionsPass"}},
	{"H21", "aibrix #1111", "wrong port of a pod; an error that isn't JSON becomes a 500", []string{"integration.TestPlainTextErrorsPassUnchanged", "integration.TestUpstreamHitIsTheLoggedDecision"}},
	{"H22", "gateway-api-inference-extension #2562", "a server on another port is left out silently", []string{"integration.TestServerOnAnotherPortIsNamed", "integration.TestUpstreamHitIsTheLoggedDecision"}},

	{"B1", "agentgateway #2402, #2621", "gzip bodies are answered 400", []string{"integration.TestGzippedBodiesPassBothWays", "integration.TestBodyCorpus"}},
	{"B3", "ai-gateway #2553, #682", "compressed errors can't be read", []string{"integration.TestGzippedBodiesPassBothWays"}},
	{"B6", "GoModel PR #201, pipelock PR #855", "a scanner of its own hides duplicates and broken JSON", []string{"integration.TestBodyCorpus", "integration.TestBodyCorpusThroughServe", "extproc.TestBudgetCorpus"}},
	{"B7", "vllm PR #44721", "max_tokens: null is answered 500", []string{"integration.TestBodyCorpus"}},
	{"B10", "gpustack #4874", "usage that is not told counts as 0", []string{"integration.TestUsageSettlesReservations", "extproc/accesslog.TestUsage"}},

	{"L1", "litellm #21553, aisix #144", "an upstream's Retry-After is lost or renamed", []string{"integration.TestUpstreamsRetryFields", "integration.TestShapeAddsRetryFieldsOnlyWhereNoneAre", "extproc/retryafter.TestEveryFormOfAWait"}},
	{"L2", "litellm PR #30098", "a 429 of one's own without Retry-After", []string{"integration.TestExactlyFiftyOfTwoHundredEnter", "integration.TestEndpointThatSaysWaitIsLeftAlone"}},
	{"L4", "ratelimit #462, #978, PR #1018", "Redis down costs seconds and memory", []string{"integration.TestReplicasOutliveTheirRedis", "admission/ratelimit.TestFrozenServerCostsOneDeadlineAndThenNothing"}},
	{"L5", "ratelimit #1143", "without Redis it doesn't start", []string{"integration.TestReplicasOutliveTheirRedis", "admission/ratelimit.TestStartsWithoutRedisAndFindsItLater"}},

	{"R14", "llm-d-router #242", "a caller's header chooses the target", []string{"integration.TestSpoofedHeadersNeverReachAnUpstream"}},
	{"R15", "new-api CVE-2026-71479", "a budget is smuggled past its level, or overflows", []string{"integration.TestBodyCorpus", "integration.TestBodyCorpusThroughServe", "extproc.TestDeclaredNumberSaturatesAndRoundsUp"}},
	{"R10", "ratelimit #462", "a flapping Redis", []string{"admission/ratelimit.TestFlappingServerNeverBlocksAndDoesNotFillTheLog", "integration.TestReplicasOutliveTheirRedis"}},
	{"R13", "Envoy's threat model", "small requests that cost much", []string{"integration.TestHostileBodiesBesideBystanders", "extproc.TestOversizedMessageIsRefused"}},
}

// TestKnownReportsHaveATest: each test that the table names is there.
func TestKnownReportsHaveATest(t *testing.T) {
	there := map[string]map[string]bool{}
	seen := map[string]bool{}
	for _, r := range knownReports {
		if seen[r.id] || r.report == "" || r.fault == "" || len(r.tests) == 0 {
			t.Errorf("%s: stands there twice, or says nothing", r.id)
		}
		seen[r.id] = true
		for _, name := range r.tests {
			dir, test, _ := strings.Cut(name, ".")
			if there[dir] == nil {
				there[dir] = testsIn(t, filepath.Join("..", dir))
			}
			if !there[dir][test] {
				t.Errorf("%s (%s): there is no %s in %s", r.id, r.report, test, dir)
			}
		}
	}
}

// testsIn are the names of a folder's tests and fuzz targets.
func testsIn(t *testing.T, dir string) map[string]bool {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, f.Name()), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && (strings.HasPrefix(f.Name.Name, "Test") || strings.HasPrefix(f.Name.Name, "Fuzz")) {
				names[f.Name.Name] = true
			}
		}
	}
	return names
}
