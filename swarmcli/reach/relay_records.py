"""How relays advertise themselves in the hash table: the record, and who keeps it there.

Each relay writes one record under its own signed subkey of `RELAYS_KEY`. The hash table stands above this package, so
what reads and writes it is handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from swarmcli.errors import SwarmError
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import MAX_ADDRESS, MAX_ADDRESSES

RELAYS_KEY = "relays"
MAX_RECORDS = 64  # of relays that a reader is given: more of them would help nobody

_LIFE = 900.0  # seconds that a record lasts …
_AGAIN = 240.0  # … and between two of them
_NOT_YET = 5.0  # seconds until a peer that could not be dialed, or reached nobody, looks again


class RelayRecord(msgspec.Struct, frozen=True):
    """A relay says this of itself."""

    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES),
    ]  # direct ones
    load: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # the share of its budgets that is in use

    def value(self) -> dict[str, Any]:
        """As it is stored."""
        return {"addresses": list(self.addresses), "load": self.load}


Find = Callable[[], Awaitable[Mapping[PeerID, RelayRecord]]]
# The record, and the seconds that it lasts; whether it is kept.
Publish = Callable[[RelayRecord, float], Awaitable[bool]]


def read_record(value: object) -> RelayRecord | None:
    """A stored value; None for one that is none of ours."""
    try:
        return wire.convert(RelayRecord, value)
    except msgspec.DecodeError:
        return None


async def advertise(describe: Callable[[], RelayRecord | None], publish: Publish) -> None:
    """Keeps this relay's record in the hash table while `describe` gives one. Never returns.

    However many others are there: who reads draws some by lot, and the hash table keeps to bounds of its own.
    """
    pause = _NOT_YET
    while True:
        record, stored = describe(), False
        if record is not None:
            with suppress(SwarmError):
                stored = await publish(record, _LIFE)
        # A network that keeps no more records is not asked every few seconds.
        pause = _AGAIN if stored else _NOT_YET if record is None else min(pause, _AGAIN)
        await asyncio.sleep(pause)
        pause = _NOT_YET if stored or record is None else 2 * pause
