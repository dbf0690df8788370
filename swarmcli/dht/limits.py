"""Bounds of one node, and the meter that counts what each peer may still write."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DHTLimits:
    """What a node takes from others and how long it waits. Sizes in bytes, times in seconds."""

    max_key: int = 512  # of a key in UTF-8
    max_subkey: int = 256
    max_value: int = 128 << 10
    max_subkeys: int = 4096  # under one key
    max_entry: int = 32 << 20  # of all records under one key
    max_storage: int = 256 << 20  # of all records that a node keeps for others
    max_expiration: float = 86400.0  # records live at most this long
    expiration_slack: float = 900.0  # how much longer than that a record from a wrong clock may live
    max_reply: int = 384 << 10  # of records in one message
    max_targets: int = 256  # ids in one question
    max_contacts: int = 512  # peers in one answer
    max_addresses: int = 8  # of one peer
    max_address: int = 256  # characters of one address
    max_records: int = 4096  # in one message
    writes_per_second: float = 256.0  # records from one peer
    write_burst: float = 8192.0
    bytes_per_second: float = 4 << 20  # of records from one peer
    bytes_burst: float = 64 << 20
    call_timeout: float = 4.0  # of one call, dialing included
    slow_after: float = 0.5  # a lookup asks somebody else too when an answer takes longer
    cache_entries: int = 1024
    cache_age: float = 15.0  # how long a reader may see what was read before, with latest=False
    probe_interval: float = 20.0  # between attempts to find lost contacts again
    refresh_interval: float = 60.0  # between looks into a part of the network not heard of
    sync_interval: float = 120.0  # between comparisons of what the replicas of a key hold
    sync_delay: float = 0.5  # after a change among the replicas, for others that follow at once
    max_evicted: int = 256  # lost contacts that are remembered


@dataclass(slots=True)
class _Budget:
    records: float
    bytes: float
    updated: float


@dataclass(slots=True)
class WriteMeter:
    """Token buckets per peer. Bounded: the peers that were quiet longest are forgotten first."""

    limits: DHTLimits
    max_peers: int = 4096
    _budgets: OrderedDict[bytes, _Budget] = field(default_factory=OrderedDict)

    def allow(self, peer: bytes, size: int, now: float) -> bool:
        """Whether `peer` may write one more record of `size` bytes at loop time `now`; counts it if so."""
        budget = self._budget(peer, now)
        if budget.records < 1 or budget.bytes < size:
            return False
        budget.records -= 1
        budget.bytes -= size
        return True

    def _budget(self, peer: bytes, now: float) -> _Budget:
        limits = self.limits
        budget = self._budgets.get(peer)
        if budget is None:
            budget = self._budgets[peer] = _Budget(limits.write_burst, limits.bytes_burst, now)
            if len(self._budgets) > self.max_peers:
                self._budgets.popitem(last=False)
            return budget
        self._budgets.move_to_end(peer)
        passed = max(0.0, now - budget.updated)
        budget.records = min(limits.write_burst, budget.records + passed * limits.writes_per_second)
        budget.bytes = min(limits.bytes_burst, budget.bytes + passed * limits.bytes_per_second)
        budget.updated = now
        return budget
