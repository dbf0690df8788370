"""How many dials a peer makes for strangers: so many that each finds out where it stands, too few for a scan or a
flood. All constants are here."""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.network.token_bucket import Meter


@dataclass(frozen=True, slots=True)
class DialLimits:
    """Dials at once, and dials per second after that.

    A peer asks three contacts at a time: when it starts, a few times in the next minutes, then every ten minutes, for
    each family of addresses. One dial costs the dialed host a connection that ends after a greeting, and the asker
    learns nothing but what the dialed peer itself hears.
    """

    peer_burst: int = 6  # for one identity …
    peer_rate: float = 1 / 60
    network_burst: int = 24  # … to hosts of one network, whoever asks (a household, a campus behind one router) …
    network_rate: float = 1 / 10
    all_burst: int = 120  # … and in all
    all_rate: float = 2.0
    under_way: int = 32  # at one moment

    def meter(self) -> Meter:
        """Counts dials by identity, by network, and in all."""
        return Meter(
            peer=(self.peer_rate, self.peer_burst),
            network=(self.network_rate, self.network_burst),
            everyone=(self.all_rate, self.all_burst),
        )


LEAST_PORT = 1024  # that is dialed where others point to: servers listen below, and routers show no client there
TRIES = 3  # of one attempt to punch; each sends one SYN
MAX_NEARBY = 3  # addresses of one LAN that are dialed

# Addresses that peers name without proof of being there. One who names somebody else's has three SYNs sent to it every
# two minutes; a crowd of identities that names the same host has 24 sent, and then one every 20 s.
CONTROL_LIMITS = DialLimits(
    peer_burst=TRIES, peer_rate=TRIES / 120, network_burst=24, network_rate=1 / 20, all_burst=120, all_rate=1.0
)
# Further connections of two that are connected directly: they lead to the host at which the other end is known to be,
# but perhaps to a neighbour's port there.
BULK_LIMITS = DialLimits(peer_burst=96, peer_rate=1.0, network_burst=96, network_rate=1.0, all_burst=960, all_rate=10.0)
# Asks alone: each has this end dial a listener or two. An honest peer asks once in two minutes.
ASK_LIMITS = DialLimits(
    peer_burst=4, peer_rate=1 / 60, network_burst=120, network_rate=1.0, all_burst=120, all_rate=1.0
)
# Dials inside this end's own network, each at up to MAX_NEARBY addresses. That both ends are seen at one host is what
# the other end says alone, so whoever is served may be a stranger who wants this LAN scanned.
NEAR_LIMITS = DialLimits(
    peer_burst=2, peer_rate=1 / 120, network_burst=12, network_rate=1 / 20, all_burst=12, all_rate=1 / 20
)
