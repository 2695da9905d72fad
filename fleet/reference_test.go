package fleet

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

const referencePath = "../docs/config.md"

const referenceHead = `# The config file

One YAML file, read by every command that takes ` + "`-f`" + `. ` + "`fairlead validate -f FILE`" + ` lists every fault with its line;
` + "`fairlead schema`" + ` prints a JSON Schema for editors. Unknown keys are refused, and so are YAML aliases, anchors, tags and a
second document. Numbers of seconds and bytes carry their unit.

A field in bold is required. ` + "`[]`" + ` marks a list. Whole examples: [full.yaml](../fleet/testdata/full.yaml) uses every key,
[minimal.yaml](../fleet/testdata/good/minimal.yaml) only those that are needed.

| field | default | meaning and accepted values |
|---|---|---|
`

const referenceTail = `
Rules that go beyond one field:

- Names are unique among pools, routes and groups each; pools and routes that are referred to exist. A pool that no route uses is no fault.
- A group's routes are matched in the order of its list. A route that an earlier one leaves no request is a fault: narrower prefixes come first,
  and routes with a model before the one without. Prefixes are compared as text. One route per group may have ` + "`connect: true`" + `.
- Several groups may have the same listening address: their sidecars run on different hosts, or get another address from their bootstrap.
- A route gives either ` + "`pool`" + ` or ` + "`split`" + `. Its split and fallback name each pool once and at most 8 pools together. Not all weights are 0,
  and a weight that is not 0 is large enough for one basis point.
- ` + "`serve`" + ` listens on TCP beyond loopback only with ` + "`{ address: IP:port, plaintext: true }`" + `; its four addresses differ.
  Sidecars connect to xds, extproc and accessLog as they stand in the file, so these cannot be ` + "`0.0.0.0`" + ` or ` + "`[::]`" + `; admin can.
- An endpoint's address is unique in its pool; the same server may be in several pools.
- Settings that nothing would read are faults: ` + "`http2`" + ` on a pool that speaks http1, telemetry settings without a source, ` + "`gpuPort`" + ` without
  ` + "`gpuPath`" + `, ` + "`trustDeclared`" + ` on a route that matches a model, ` + "`oversize`" + ` without ` + "`maxOutput`" + `, ` + "`serve.redis`" + ` without limits, a limit that limits nothing.
- ` + "`skipBody`" + ` does not go together with a route's model, with ` + "`readUser`" + `, nor with ` + "`unread: refuse`" + ` unless there is ` + "`trustDeclared`" + `.
- A route is in one limit at most, and one limit at most names no routes: it counts for all that no other names.
- Clients that a limit tells apart by ` + "`key: jwt`" + ` need ` + "`jwt`" + ` on the listener of each group with a route of it, and those by ` + "`key: mtls`" + ` need ` + "`tls.clientCA`" + ` there.
- A route's ` + "`defaultMaxTokens`" + ` is at most what its limit, and each of the limit's clients, has of tokens in a window.
- ` + "`serve.shard`" + ` is below ` + "`serve.redis.replicas`" + `.
- Bodies that name no readable model take the group's next route without one whose prefix holds the paths of a route with one. That route has the limit
  and the ` + "`onFailure: closed`" + ` that the one with the model has, or else ` + "`unread: refuse`" + `.
- ` + "`retryFields: computed`" + ` and ` + "`onFailure: closed`" + ` do not go together.
`

// TestReferenceIsCurrent keeps docs/config.md equal to the tables.
func TestReferenceIsCurrent(t *testing.T) {
	var b strings.Builder
	b.WriteString(referenceHead)
	referenceRows(&b, "", configFields(new(Config)))
	b.WriteString(referenceTail)
	if *update {
		if err := os.WriteFile(referencePath, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if string(mustRead(t, referencePath)) != b.String() {
		t.Errorf("%s is not what the tables say; run go test ./fleet -run Reference -update", referencePath)
	}
}

func referenceRows(b *strings.Builder, path string, fields []field) {
	for _, f := range fields {
		if f.later != "" {
			continue
		}
		at := join(path, f.name)
		name := "`" + at + "`"
		if f.value.many {
			name = "`" + at + "[]`"
			at += "[]"
		}
		if f.required {
			name = "**" + name + "**"
		}
		preset := ""
		if f.preset != "" {
			preset = "`" + f.preset + "`"
		}
		fmt.Fprintf(b, "| %s | %s | %s |\n", name, preset, strings.ReplaceAll(f.meaning(), "|", `\|`))
		referenceRows(b, at, f.value.fields)
	}
}

// meaning is a field's text; for mappings and lists the fields that follow say
// what is accepted.
func (f field) meaning() string {
	if f.value.fields != nil {
		return f.doc
	}
	return strings.TrimSpace(f.doc + " Accepted: " + f.value.accepted + ".")
}
