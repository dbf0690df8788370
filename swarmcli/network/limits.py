"""The bounds that an endpoint keeps to and holds others to."""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.network.budgets import BUDGETS, Budgets

MAX_ADDRESSES = 8  # that a peer may name for itself
MAX_ADDRESS = 512  # characters
MAX_TAG_BYTES = 256  # of what a group or a state says about itself


@dataclass(frozen=True, slots=True)
class NetworkLimits:
    """Sizes in bytes, times in seconds. The first four must agree between peers, or honest ones will be refused.

    A transport is made with them and keeps to the sizes of a frame; the endpoint on it keeps to the others.
    """

    max_message: int = 1 << 20  # one message with its envelope: the header of a frame
    max_payload: int = 16 << 20  # the raw bytes behind one message of a stream
    max_calls_per_peer: int = 1024  # unanswered ones; own calls beyond it wait, a peer's are a violation
    max_streams_per_peer: int = 64  # that this endpoint opens to one peer at a time; further ones wait
    handshake_grace: float = 2.0  # after which a stranger may be dropped to make room for another
    handshake_timeout: float = 10.0  # after which a stranger is dropped in any case
    max_idle_bulk_per_peer: int = 4  # kept for the next stream …
    bulk_idle_timeout: float = 60.0  # … for this long
    stream_window: int = 4 << 20  # received and not yet read by the stream's owner; beyond it the sender waits
    keepalive_interval: float = 1.0  # of silence before a ping, while someone waits for this peer
    keepalive_idle_interval: float = 5.0  # the same while nobody does
    keepalive_timeout: float = 6.0  # of silence after a ping before a peer is taken for dead
    longest_round_trip: float = 1.5  # that is believed: whoever answers pings late makes nobody wait "some round trips"
    asleep_after: float = 15.0  # without a tick of the keepalive: by now others have taken this peer for dead
    dial_timeout: float = 10.0  # for all addresses of a peer together
    dial_stagger: float = 0.25  # between the starts of two attempts at one peer (RFC 8305, section 5)
    # That silent direct addresses have before a relay is tried beside them: a TLS handshake with the other side of the
    # world takes less, and a connection that is needlessly relayed costs somebody else's link for as long as it stands.
    relay_patience: float = 1.5
    write_high: int = 512 << 10  # bytes waiting in a connection's write buffer above which senders wait …
    write_low: int = 128 << 10  # … and below which they go on
    enough: int = 32 << 10  # two TLS records: worth being woken for in the middle of a payload
    direct: int = 64 << 10  # of a payload; from here on a reader that names its memory is worth waiting for
    short_words: int = 2 << 10  # of a frame without a payload that waits for no turn where the link is limited
    backlog: int = 1024  # connections that the system takes in before this process does
    accept_retry: float = 0.1  # when the system has no more file descriptors or memory
    probes: int = 256  # connections for probing that others may hold at one time …
    probe_life: float = 30.0  # … and for so long
    surplus_life: float = 5.0  # without a call, after which both ends are sure to use the better of two connections
    linger: float = 2.0  # that an ending connection waits for the other end to have read everything
    goodbye_timeout: float = 1.0  # for the farewell to all peers when an endpoint closes
    max_known_peers: int = 4096  # in the address book that have said something themselves, and as many by hearsay
    failed_dials_burst: float = 256.0  # dials that may fail at once at addresses which other peers have named …
    failed_dials_per_second: float = 8.0  # … and in the long run …
    failed_dials_burst_per_host: float = 64.0  # … and at one host: many honest peers may share it
    failed_dials_per_second_per_host: float = 1.0
    budgets: Budgets = BUDGETS  # of memory and connections, for identities, prefixes and everyone
