"""What auxiliaries are told about a round, by whom, and what of it they believe."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.round.phases import PhaseNews, StepAnswer, StepQuestion
from swarmcli.errors import CallRefused, RoundFailed, RoundUndecided
from tests.averaging.averagers import Averagers, all_outcomes
from tests.averaging.round.programs import add, untouched
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import within


@within(600)
async def test_answers_come_when_they_are_known_and_only_to_members() -> None:
    async with Swarm([Kind(), Kind(), Kind(auxiliary=True)]) as swarm:
        group, teller = swarm.group(), swarm.peers[0]
        news = [PhaseNews(peer.service) for peer in swarm.peers]
        for each in news:
            each.start()
        with news[0].telling(group) as tell:
            asking = asyncio.create_task(news[2].ask(group, 2))
            await asyncio.sleep(1)
            tell(StepAnswer(1))
            await asyncio.sleep(1)
            assert not asking.done()
            tell(StepAnswer(weights={0: 2.0}))
            assert await asking == StepAnswer(weights={0: 2.0})
            assert await news[2].ask(group, 1) == StepAnswer(1)
            other = asyncio.create_task(news[2].ask(group, 3))
            await asyncio.sleep(1)
            stranger = swarm.peers[1].peer_id
            question = StepQuestion(bytes(32), 1)
            with pytest.raises(CallRefused, match="not known here"):
                await news[0]._answer(stranger, question)
        with pytest.raises(RoundUndecided, match="nobody in reach"):
            await other  # the one who knew has left
        assert await news[2].ask(group, 2) == StepAnswer(weights={0: 2.0})  # what was said stays
        assert teller.peer_id in group
        for each in news:
            each.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (StepAnswer(phase=7), RoundUndecided),
        (StepAnswer(weights={99: 1.0}), RoundUndecided),
        (StepAnswer(weights={0: float("nan")}), RoundUndecided),
        (StepAnswer(weights={0: -1.0}), RoundUndecided),
        (StepAnswer(failed="because"), RoundFailed),
    ],
)
@within(600)
async def test_an_auxiliary_does_not_believe_what_cannot_be(
    answer: StepAnswer, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Averagers(1) as swarm:
        peers = [await add(swarm, value) for value in (1.0, 5.0)]
        helper = await add(swarm, 0.0, auxiliary=True)

        async def told(self: PhaseNews, group, steps: int) -> StepAnswer:
            return answer

        monkeypatch.setattr(PhaseNews, "ask", told)
        controls = [peer.begin(allow_retries=False) for peer in [*peers, helper]]
        (outcome,) = await all_outcomes([controls[-1]])
        assert isinstance(outcome, error) and untouched(helper)
        await all_outcomes(controls[:-1])
