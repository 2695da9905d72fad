//go:build !unix

package serve

import "os"

// lockFolder opens the folder; this system has no lock that ends with a killed
// process, so two processes in one folder are not noticed.
func lockFolder(dir string) (*os.File, error) { return os.Open(dir) }
