"""Strangers that agree need no further message; where one is missing, the others compare and confirm."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.testing import virtual_time
from tests.averaging.rounds import Kind, Outcome, Swarm


@pytest.mark.parametrize(("dead", "kind"), [(None, "vote"), (3, "confirm")])
def test_only_who_is_missing_costs_messages(dead: int | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()
    ask = GroupCalls.ask

    async def counted(mates: GroupCalls, index: int, name: str, *rest: Any) -> Any:
        asked[name] += 1
        return await ask(mates, index, name, *rest)

    monkeypatch.setattr(GroupCalls, "ask", counted)

    async def main() -> list[Outcome | None]:
        async with Swarm([Kind(), Kind(), Kind(), Kind(bandwidth=0)], bandwidth=60_000.0) as swarm:

            async def kill() -> None:
                if dead is not None:
                    await asyncio.sleep(0.15)
                    swarm.kill(dead)

            return await swarm.round(kill)

    outcomes = [outcome for outcome in virtual_time.run(main(), timeout=100) if isinstance(outcome, AllreduceResult)]
    assert len(outcomes) == (4 if dead is None else 3)
    for outcome in outcomes:
        assert outcome.certificate is not None and outcome.certificate.verify()
        assert outcome.certificate.votes.kind == kind and outcome.certificate.digest == outcome.digest
    if dead is None:
        assert asked == {"vote": 3, "outcome": 3}
