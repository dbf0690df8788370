"""How relays advertise themselves in the hash table: the record, and who keeps it there.

Each relay writes one record under its own signed subkey of `RELAYS_KEY`. The hash table stands above this package, so
what reads and writes it is handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from swarmcli.errors import SwarmError
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import MAX_ADDRESS, MAX_ADDRESSES

RELAYS_KEY = "relays"
MAX_RECORDS = 64  # of relays that a reader is given: more of them would help nobody


@dataclass(frozen=True, slots=True)
class AdvertisingTimes:
    """In seconds."""

    life: float = 900.0  # that a record lasts …
    again: float = 240.0  # … and between two of them
    not_yet: float = 5.0  # until a peer that could not be dialed, or reached nobody, looks again


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


async def advertise(
    describe: Callable[[], RelayRecord | None], publish: Publish, times: AdvertisingTimes = AdvertisingTimes()
) -> None:
    """Keeps this relay's record in the hash table while `describe` gives one. Never returns.

    However many others are there: who reads draws some by lot, and the hash table keeps to bounds of its own.
    """
    pause = times.not_yet
    while True:
        record, stored = describe(), False
        if record is not None:
            with suppress(SwarmError):
                stored = await publish(record, times.life)
        # A network that keeps no more records is not asked every few seconds.
        pause = times.again if stored else times.not_yet if record is None else min(pause, times.again)
        await asyncio.sleep(pause)
        pause = times.not_yet if stored or record is None else 2 * pause
