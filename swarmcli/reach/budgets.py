"""How many dials a peer makes for strangers: enough for each to find out who can dial it, too few for a scan or a
flood. All constants of that are here."""

from __future__ import annotations

from typing import TypeAlias

from swarmcli.network.token_bucket import Bound

# The bounds of a Meter of dials: by the asking identity, by network (of the asker or of the dialed host), of everyone.
DialLimits: TypeAlias = dict[str, Bound]

# A peer asks three contacts at a time: when it starts, a few times in the next minutes, then every ten minutes, for
# each family of addresses. One dial costs the dialed host a connection that ends after a greeting, and the asker
# learns nothing but what the dialed peer itself hears.
BACK_LIMITS: DialLimits = {"peer": (1 / 60, 6), "network": (1 / 10, 24), "everyone": (2.0, 120)}
BACK_UNDER_WAY = 32  # at one moment

LEAST_PORT = 1024  # the lowest port that is dialed at named addresses: below it are servers, and no router's client
TRIES = 3  # of one attempt to punch; each sends one SYN
MAX_NEARBY = 3  # addresses of one LAN that are dialed

# Dials at addresses that peers name without proof of being there. A peer that names a victim's address makes this one
# send it three SYNs every two minutes; a crowd of identities that names one host, 24, and then one every 20 s.
CONTROL_LIMITS: DialLimits = {"peer": (TRIES / 120, TRIES), "network": (1 / 20, 24), "everyone": (1.0, 120)}
# Further connections between two peers that are connected directly: they lead to the host at which the other end is
# known to be, but perhaps to a neighbour's port there.
BULK_LIMITS: DialLimits = {"peer": (1.0, 96), "network": (1.0, 96), "everyone": (10.0, 960)}
# Requests to punch: each makes this end dial a listener or two. An honest peer asks once in two minutes.
ASK_LIMITS: DialLimits = {"peer": (1 / 60, 4), "network": (1.0, 120), "everyone": (1.0, 120)}
# Dials inside this end's own network, each at up to MAX_NEARBY addresses. Only the other end says that both are seen at
# one host, so it may be a stranger that wants this LAN scanned.
NEAR_LIMITS: DialLimits = {"peer": (1 / 120, 2), "everyone": (1 / 20, 12)}
