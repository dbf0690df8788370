"""Asking the router for a port that leads to this peer: PCP, NAT-PMP, UPnP.

PortMapping ── a Method per protocol ── the default gateway, and nobody else
"""

from swarmcli.reach.mapping.gateway import Gateway, Mapping, default_gateway
from swarmcli.reach.mapping.lease import NOT_ASKED, PortMapping

__all__ = ["NOT_ASKED", "Gateway", "Mapping", "PortMapping", "default_gateway"]
