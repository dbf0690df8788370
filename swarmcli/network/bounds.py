"""The bounds that an endpoint keeps and makes others keep."""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.network.budgets import BUDGETS, Budgets

MAX_ADDRESSES = 8  # that a peer may name for itself
MAX_ADDRESS = 512  # characters
MAX_TAG_BYTES = 256  # of what a group or a state says about itself
MAX_KNOWN_PEERS = 4096  # in the address book that have answered or told something, and as many known by hearsay
# Seconds
LONGEST_ROUND_TRIP = 1.5  # that is believed: a peer that answers late on purpose must not prolong others' waits
DIAL_TIMEOUT = 10.0  # for all addresses of a peer together
DIAL_STAGGER = 0.25  # between the starts of two attempts at one peer (RFC 8305, section 5)


@dataclass(frozen=True, slots=True)
class NetworkLimits:
    """Sizes in bytes, times in seconds. The first four must agree between peers, or honest ones will be refused.

    A transport is made with them and keeps to the sizes of a frame; the endpoint on it keeps to the others.
    """

    max_message: int = 1 << 20  # one message with its envelope: the header of a frame
    max_payload: int = 16 << 20  # the raw bytes that follow one message of a stream
    max_calls_per_peer: int = 1024  # unanswered ones; own calls beyond it wait, a peer's are a violation
    max_streams_per_peer: int = 64  # that this endpoint opens to one peer at a time; further ones wait
    handshake_grace: float = 2.0  # after which a stranger may be dropped to make room for another
    handshake_timeout: float = 10.0  # after which a stranger is dropped in any case
    max_idle_bulk_per_peer: int = 4  # kept for the next stream
    keepalive_interval: float = 1.0  # of silence before a ping, while someone waits for this peer
    keepalive_idle_interval: float = 5.0  # the same while nobody does
    keepalive_timeout: float = 6.0  # of silence after a ping before a peer is taken for dead
    asleep_after: float = 15.0  # without a tick of the keepalive: others have taken this peer for dead by then
    budgets: Budgets = BUDGETS  # of memory and connections, for identities, prefixes and everyone
