"""Bounds of one node. Those of single messages are in `messages.py`, whose types carry them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DHTLimits:
    """Bounds what a node takes from others, and how long it waits. Sizes in bytes, times in seconds."""

    max_key: int = 512  # of a key in UTF-8
    max_subkey: int = 256
    max_value: int = 128 << 10
    max_subkeys: int = 4096  # under one key
    max_entry: int = 32 << 20  # of all records under one key
    max_storage: int = 256 << 20  # of all records that a node keeps for others …
    max_stored: int = 65536  # … and how many
    max_directory: int = 256  # subkeys under a key that every peer reads: the relays' …
    max_relay: int = 8 << 10  # … and bytes of a value there: eight addresses
    # Of one network prefix, unless many honest peers may well share it. What is full makes room at the cost of the one
    # that holds the most.
    prefixes_in_key: int = 8  # that fill a key: one of them has so large a part of its places
    storage_per_prefix: int = 64 << 20
    max_expiration: float = 86400.0  # records live at most this long
    expiration_slack: float = 900.0  # how much longer than that a record from a wrong clock may live
    max_reply: int = 384 << 10  # of records in one message
    writes_per_second: float = 256.0  # records from one peer
    write_burst: float = 8192.0
    bytes_per_second: float = 4 << 20  # of records from one peer
    bytes_burst: float = 64 << 20
    # One peer may have so much looked up: a question counts 1, a record in the answer and a compared key 0.1; one is 30
    # to 100 µs of the loop.
    work_per_second: float = 500.0
    work_burst: float = 20000.0
    prefix_factor: float = 4.0  # what all of one network prefix may do, as a multiple of what one peer may
    call_timeout: float = 4.0  # of one call, dialing included
    slow_after: float = 0.5  # a lookup asks another node too when an answer takes longer
    cache_entries: int = 1024
    cache_age: float = 15.0  # how long a reader may see what was read before, with latest=False
    probe_interval: float = 20.0  # between attempts to find lost contacts again
    refresh_interval: float = 60.0  # between looks into a part of the network not heard of
    sync_interval: float = 120.0  # between comparisons of what the replicas of a key hold
    sync_delay: float = 0.5  # after a change among the replicas, for others that follow at once
    shortest_timeout: float = 2.0  # of a call to a near node; a busy machine is not a dead one
    slow_link: float = 64 << 10  # bytes per second that records are given to arrive
    jitter: float = 0.25  # periods differ by up to this fraction, so that nodes started together do not act together
    # A search takes so many paths where the neighbourhood of its target is not known, as many as it asks at a time …
    paths: int = 3
    small_network: int = 3  # … unless the table has less than so many buckets full of contacts: some 80 nodes
    follow_interval: float = 15.0  # after which a follower looks up the replicas anew: nearer nodes may have come
    store_rounds: int = 8  # of replacing nodes that answered the search and then failed to store
    renumberings: int = 3  # of one record, where its owner's earlier life has stored a higher number
    remembered_writes: int = 1 << 14  # own records whose numbers are remembered
    shortest_tombstone: float = 60.0  # that a withdrawal stays, at the least
    remembered_syncs: int = 1 << 14  # keys, of each replica, that were sent whole and are not sent the same again
    max_evicted: int = 256  # lost contacts that are remembered
    probes: int = 4  # of these are tried at a time …
    probe_pause: float = 1.0  # … and so long is between two rounds, at the least
    first_probe: float = 2.0  # until a contact that did not answer is tried again: four times as long each time …
    longest_probe: float = 600.0  # … up to this
    ban: float = 300.0  # for which a node is not asked that has sent what no honest node sends
