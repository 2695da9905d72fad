package telemetry

// XIDClass says what an XID error code means for a server on that GPU. Higher
// is graver.
type XIDClass uint8

// XID classes.
const (
	// XIDHarmless: nothing to do for routing; also every unknown code, because
	// an unknown number must not cost capacity.
	XIDHarmless XIDClass = iota + 1
	// XIDDrain: usable now, to be reset at leisure.
	XIDDrain
	// XIDSuspect: the process on the GPU dies or died, the GPU is fine.
	XIDSuspect
	// XIDEject: the GPU needs a reset or the node a reboot.
	XIDEject
)

// XIDLost is the code of a GPU that has fallen off the bus.
const XIDLost = 79

// ClassifyXID returns the class of a code. 0 (none) is harmless.
//
// Source: NVIDIA's XID catalogue, column "immediate action", Ampere and later:
// RESET_GPU, RESTART_BM and RESTART_VM eject; RESTART_APP is suspect; contained
// or corrected errors that ask for a later reset drain. 45 follows another code
// and 43 leaves the GPU healthy by that catalogue, so both are harmless, though
// DCGM's own health check warns of 43.
func ClassifyXID(code int) XIDClass {
	switch code {
	case 46, 48, 62, 64, 74, XIDLost, 95, 109, 110, 119, 120, 136, 140, 143, 149, 151, 155, 156, 158:
		return XIDEject
	case 8, 11, 13, 25, 31, 32, 39, 40, 41, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89,
		96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 139:
		return XIDSuspect
	case 63, 92, 94, 121, 157:
		return XIDDrain
	}
	return XIDHarmless
}
