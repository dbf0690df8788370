"""Bounds of one node. Those of single messages are in `messages.py`, whose types carry them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DHTLimits:
    """Bounds what a node takes from others. Sizes in bytes, times in seconds."""

    max_key: int = 512  # of a key in UTF-8
    max_subkey: int = 256
    max_value: int = 128 << 10
    max_subkeys: int = 4096  # under one key
    max_entry: int = 32 << 20  # of all records under one key
    max_storage: int = 256 << 20  # of all records that a node keeps for others …
    max_stored: int = 65536  # … and how many
    max_directory: int = 256  # subkeys under a key that every peer reads: the relays' …
    max_relay: int = 8 << 10  # … and bytes of a value there: eight addresses
    # The next ones bound one network prefix, unless many honest peers may well share it. A full store makes room at
    # the cost of the prefix that holds the most.
    prefixes_in_key: int = 8  # that fill a key: one prefix holds at most an eighth of its places
    storage_per_prefix: int = 64 << 20
    max_expiration: float = 86400.0  # records live at most this long
    expiration_slack: float = 900.0  # how much longer than that a record from a wrong clock may live
    max_reply: int = 384 << 10  # of records in one message
    # Units of work that one peer may cause; all peers of one network prefix, four times as many. A question counts 1, a
    # record in the answer and a compared key 0.1, a record to store 2, and 1 more for each 8 KiB of it. A unit takes
    # 30 to 100 µs of the loop.
    work_per_second: float = 500.0
    work_burst: float = 20000.0
    cache_entries: int = 1024
    sync_interval: float = 120.0  # between comparisons of what the replicas of a key hold
