"""How much others can make this peer take, on one page: memory, processor, sockets, dials, clock samples, contacts.

A *stranger* has proved nothing yet, an *identity* has proved a key and costs nothing, a *prefix* (`prefix.py`) costs an
address in another network. So what an identity may take keeps honest peers from hurting each other by mistake; what a
prefix may take, and everyone together, keeps an attacker from taking this peer's memory. Where everyone's budget is
used up, the prefix that uses the most of its own gives way, and in it whoever is least known.

Rows of this module are kept by a `Ledger`. Bounds of other layers stand beside the code that keeps them:

    what                                           of an identity  of a prefix (shared)  of everyone   where
    payloads that nobody has asked for yet         64 MiB          128 MiB (256 MiB)     512 MiB       payloads
    messages above 64 KiB, until they are whole    32 MiB          64 MiB (128 MiB)      256 MiB       heads
    calls unanswered, 4 KiB each and their bytes   32 MiB          64 MiB (128 MiB)      256 MiB       requests
    answers that are not read, likewise            32 MiB          64 MiB (128 MiB)      256 MiB       replies
    control connections                            8               256 (1024)            4096          connections
    bulk connections that others dialed            160             512 (2048)            4096          bulk
    handshakes of strangers at one moment          -               64 (256)              256           handshakes
    handshakes of strangers per second             -               32 (512)              -             handshake_rate
    dials for streams that others ask for          -               32 (512) a second     -             handshake_rate
    handshakes that one relay brings               32, 16/s       -                     -             reach/circuits.py
    dials that fail where others pointed to        64 a host       -                     256, 8/s      dialer.py
    dials for others: back, or by punching         6, 1 a minute   24, 1 in 10 s         120, 2/s      reach/budgets.py
    probes held for others                         -               -                     256           probes.py
    peers in the address book                      8 addresses     -                     4096 + 4096   bounds.py
    reservations at a relay, its circuits          its options     32, 192               its options   reach/relaying.py
    samples of the swarm's clock, of which votes   1               4, 1 (4)              64            clock.py
    a round trip that patience goes by             -               -                     1.5 s         bounds.py
    members of rounds that are remembered          -               -                     65536         round/service.py
    correction of the swarm's clock                -               -                     1 hour        clock.py
    records under one key of the hash table        512             512 (4096)            4096          dht/bounds.py
    … handed on by a node near the key             3072            3072 (4096)           4096          dht/bounds.py
    … under the key of the relays                  32              32 (256)              256           dht/bounds.py
    … of a key that is read, by who tells them     4096, 32 MiB    the same (-)          -             dht/bounds.py
    bytes of records                               16 MiB          64 MiB (256 MiB)      256 MiB       dht/bounds.py
    records written, per second                    256             1024 (-)              -             dht/bounds.py
    questions to the hash table, per second        500             2000 (-)              -             dht/bounds.py
    contacts that were named, before any answers   4 a search      -                     160 a search  dht/lookup.py
    downloads of a state, of kept rounds           -               1 if others wait      4, 8          state/donor.py
    … that wait in line, that have a copy to read  -               none if it is full    256, 2        state/donor.py
    memory for a state of which nothing has come   -               -                     512 MiB       state/assembly.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

_MIB = 1 << 20

try:
    import resource
except ImportError:  # Windows has no such bound on sockets
    resource = None  # type: ignore[assignment]


def allow_descriptors(wanted: int) -> int:
    """Raises this process's soft limit of descriptors to `wanted`, as far as the hard one permits. Returns how many it
    may then have."""
    if resource is None:
        return sys.maxsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return max(soft, allowed)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # macOS names a hard limit that it does not grant
        return soft
    return allowed


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of one thing may be taken at one moment."""

    identity: int
    prefix: int  # for a prefix that one owner may well have alone: a /24, a /48 of IPv6
    shared: int  # for one that many honest peers share: this machine, the LAN, a carrier's customers, one relay
    everyone: int

    def __post_init__(self) -> None:
        if not 0 < self.identity <= self.prefix <= self.shared <= self.everyone:
            raise ValueError(f"a budget grows from identity over prefix and shared prefix to everyone, got {self}")

    def at_most(self, everyone: int) -> Budget:
        """The same with a lower bound for everyone: one prefix takes at most a quarter of it, a shared one half."""
        if everyone >= self.everyone:
            return self
        shared, prefix = min(self.shared, max(1, everyone // 2)), min(self.prefix, max(1, everyone // 4))
        return Budget(min(self.identity, max(1, prefix // 2)), prefix, shared, everyone)


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets that an endpoint and its transports keep. Sizes in bytes."""

    payloads: Budget = Budget(64 * _MIB, 128 * _MIB, 256 * _MIB, 512 * _MIB)
    requests: Budget = Budget(32 * _MIB, 64 * _MIB, 128 * _MIB, 256 * _MIB)
    heads: Budget = Budget(32 * _MIB, 64 * _MIB, 128 * _MIB, 256 * _MIB)
    replies: Budget = Budget(32 * _MIB, 64 * _MIB, 128 * _MIB, 256 * _MIB)
    # An honest pair that dials directly, over a relay and by punching at once has about five for a moment.
    connections: Budget = Budget(8, 256, 1024, 4096)
    bulk: Budget = Budget(160, 512, 2048, 4096)
    handshakes: Budget = Budget(64, 64, 256, 256)
    # Handshakes of strangers in one prefix, per second in the long run and at once; and in one that many honest peers
    # share. A handshake takes a millisecond or two of the processor: one prefix takes a tenth of one core at most.
    handshake_rate: tuple[float, float] = (32.0, 256.0)
    shared_handshake_rate: tuple[float, float] = (512.0, 2048.0)
    free_bytes: int = 64 << 10  # of calls, of answers, of a message, that one may hold before the ledger is asked
    patience: float = 10.0  # seconds for which a payload may lie or arrive while others wait for its room
    standing: float = 600.0  # seconds; a peer connected for a shorter time gives way to one connected for longer
    # Files and sockets that a process needs besides those that others dial: its own dials, journals, checkpoints, data.
    # Without this reserve, a stranger that fills the budgets would keep the process from writing a checkpoint.
    own_descriptors: int = 512
    least_connections: int = 64  # of control and of bulk ones each, however few descriptors the system gives

    @property
    def descriptors(self) -> int:
        """How many files and sockets a process with these budgets needs."""
        return self.own_descriptors + self.connections.everyone + self.bulk.everyone + self.handshakes.everyone

    def within(self, descriptors: int) -> Budgets:
        """Lowers the budgets for a process that has only so many: fewer connections, but at least `least_connections`,
        which any swarm needs."""
        if descriptors >= self.descriptors:
            return self
        half = max(self.least_connections, (descriptors - self.own_descriptors - self.handshakes.everyone) // 2)
        return replace(self, connections=self.connections.at_most(half), bulk=self.bulk.at_most(half))


BUDGETS = Budgets()
