"""Asking the router for a port that leads to this peer, with NAT-PMP and UPnP.

PortMapping ── a Method per protocol ── the default gateway, and nobody else
"""

from swarmcli.reach.mapping.gateway import Gateway, Mapping, MappingTimes, default_gateway
from swarmcli.reach.mapping.lease import NOT_ASKED, PortMapping

__all__ = ["NOT_ASKED", "Gateway", "Mapping", "MappingTimes", "PortMapping", "default_gateway"]
