"""Lies that cost time: members that are there, say that they are at work, and keep the others waiting."""

from __future__ import annotations

import asyncio
from typing import Any

from swarmcli.averaging.round.messages import AverageHeader, PartHeader
from tests.adversary.lies.base import Liar, lie
from tests.adversary.lies.parts import as_reducer, as_sender

DRIP = 14.0  # seconds between two pieces: never as long as silence is borne


@lie("trickling sender", "parts", at_most="one third of a round's time in one round; no seat in the next group")
def trickle_parts(liar: Liar) -> None:
    as_sender(liar, lambda message, payload: _drop_by_drop(liar, PartHeader, message, payload))


@lie("trickling reducer", "parts", at_most="a second try in one round; nothing to reduce and no seat in the next group")
def trickle_averages(liar: Liar) -> None:
    as_reducer(liar, lambda round_, stream, message, payload: _drop_by_drop(liar, AverageHeader, message, payload))


async def _drop_by_drop(liar: Liar, kind: type, message: Any, payload: Any) -> tuple[Any, Any]:
    if isinstance(message, kind):
        liar.told.append("a drop")
        await asyncio.sleep(DRIP)
    return message, payload


@lie("always about to begin", "parts", at_most="the time for a member's last batch in one round; no seat in the next")
def never_begin(liar: Liar) -> None:
    """It answers that it takes part and is still computing, and never begins."""
    assert liar.averager is not None
    averager = liar.averager
    find = averager._find_and_average

    async def compute_for_ever(control: Any, chronicle: Any, gathered: bytes, deadline: float | None) -> Any:
        group = await averager.finder.find(control, gathered, deadline)
        control.mark_begun(group)
        with averager._service.expecting(group):
            liar.told.append("still computing")
            await asyncio.sleep(1e6)
        return await find(control, chronicle, gathered, deadline)

    averager._find_and_average = compute_for_ever  # type: ignore[method-assign]
