package fleet

import "net/netip"

func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
