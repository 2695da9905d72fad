// Command protogen generates the Go code of a .proto file beside it, without
// protoc: the file is compiled by protocompile, and the plugins are those that
// go.mod names as tools.
//
// Usage: protogen [-out DIR] FILE.proto
//
// The file lies in a Go module; it may import .proto files by their path from
// the module's root, and Google's well-known types.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	out := flag.String("out", "", "folder for the generated files; default: the file's own")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: protogen [-out DIR] FILE.proto")
		os.Exit(2)
	}
	if err := Generate(flag.Arg(0), *out); err != nil {
		fmt.Fprintln(os.Stderr, "protogen:", err)
		os.Exit(1)
	}
}
