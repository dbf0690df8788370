"""Whole swarms in one process, without sockets and without waiting: for tests, here and in other projects."""

from swarmcli.testing import virtual_time
from swarmcli.testing.memory_network import MemoryNetwork
from swarmcli.testing.memory_transport import MemoryTransport

__all__ = ["MemoryNetwork", "MemoryTransport", "virtual_time"]
