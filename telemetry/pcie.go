package telemetry

// PCIeGenerations is the newest generation that [PCIeBandwidth] knows.
const PCIeGenerations = 7

// pcieLanes is what one PCIe lane carries one way, in bytes per second, by
// generation less one: transfers per second, eight to a byte, less the encoding.
// Sources: PCI Express Base Specification 2.1 (8b/10b at 2.5 and 5 GT/s), 3.0 to
// 5.0 (128b/130b at 8, 16 and 32 GT/s), 6.0 and 7.0 (flits of 256 bytes at 64
// and 128 GT/s, of which 236 are packets; 6 of the link layer, 8 of CRC and 6 of
// error correction carry no data). Headers of packets are not taken off.
var pcieLanes = [PCIeGenerations]float64{
	2.5e9 / 8 * 8 / 10, 5e9 / 8 * 8 / 10,
	8e9 / 8 * 128 / 130, 16e9 / 8 * 128 / 130, 32e9 / 8 * 128 / 130,
	64e9 / 8 * 236 / 256, 128e9 / 8 * 236 / 256,
}

// PCIeBandwidth returns the bytes per second that a PCIe link carries one way,
// and 0 for a generation that is not known or no lanes. DCGM's Go binding has a
// table too; it is not used because it has 0 for generation 5.
func PCIeBandwidth(generation, lanes int) float64 {
	if generation < 1 || generation > PCIeGenerations || lanes < 1 {
		return 0
	}
	return pcieLanes[generation-1] * float64(lanes)
}
