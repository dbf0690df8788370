"""Whole swarms in one process, without sockets and without waiting: for tests, here and in other projects."""

from swarmcli.testing import virtual_time
from swarmcli.testing.memory_network import MemoryNetwork, MemoryTransport
from swarmcli.testing.swarm import Swarm
from swarmcli.testing.virtual_time import Deadlock, run

__all__ = ["Deadlock", "MemoryNetwork", "MemoryTransport", "Swarm", "run", "virtual_time"]
