"""Bounds of one node. Those of single messages are in `messages.py`, whose types carry them."""

from __future__ import annotations

from dataclasses import dataclass


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
    writes_per_second: float = 256.0  # records from one peer
    write_burst: float = 8192.0
    bytes_per_second: float = 4 << 20  # of records from one peer
    bytes_burst: float = 64 << 20
    call_timeout: float = 4.0  # of one call, dialing included
    slow_after: float = 0.5  # a lookup asks another node too when an answer takes longer
    cache_entries: int = 1024
    cache_age: float = 15.0  # how long a reader may see what was read before, with latest=False
    probe_interval: float = 20.0  # between attempts to find lost contacts again
    refresh_interval: float = 60.0  # between looks into a part of the network not heard of
    sync_interval: float = 120.0  # between comparisons of what the replicas of a key hold
    sync_delay: float = 0.5  # after a change among the replicas, for others that follow at once
    max_evicted: int = 256  # lost contacts that are remembered
