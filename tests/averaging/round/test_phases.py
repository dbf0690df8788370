"""Rounds of several phases have one outcome, and everyone who counts, counts in all of them."""

from __future__ import annotations

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.round.buffers import Inputs
from swarmcli.averaging.round.service import phases_of
from swarmcli.errors import RoundFailed, RoundUndecided
from tests.averaging.averagers import Averagers, all_outcomes, all_results
from tests.averaging.round.programs import Doubling, add, check, strike_in_step, untouched
from tests.simulation import within


@within(3600)
async def test_the_second_phase_builds_on_the_average_of_the_first() -> None:
    async with Averagers(1) as swarm:
        values = {await add(swarm, float(value)): (float(value), weight) for value, weight in ((1, 1), (2, 3), (6, 2))}
        results = await all_results([peer.begin(weight=weight) for peer, (_, weight) in values.items()])
        check(list(values), values, results[0])
        assert all(result.total_weight == 6 and len(result.contributors) == 3 for result in results)
        assert len({result.group.group_id for result in results}) == 1
        # Both phases travelled: each peer's own share excepted, every byte goes to a reducer and comes back.
        assert all(result.bytes_sent > 2 * 470 * 4 / 3 for result in results)


@within(3600)
async def test_a_sender_whose_tensors_break_in_the_second_phase_fails_the_round_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Averagers(6) as swarm:
        values = {await add(swarm, value): (value, 1.0) for value in (1.0, 5.0, 3.0)}
        peers = list(values)
        broken = peers[1].core._program
        assert isinstance(broken, Doubling)
        inputs = broken.inputs

        def spoiled(phase: int, factor: float) -> list[torch.Tensor]:
            return [tensor * (float("nan") if phase == 1 else 1.0) for tensor in inputs(phase, factor)]

        monkeypatch.setattr(broken, "inputs", spoiled)
        outcomes = await all_outcomes([peer.begin(allow_retries=False) for peer in peers])
        for outcome in outcomes:
            assert isinstance(outcome, RoundFailed) and outcome.suspects == (peers[1].peer_id,), outcome
        assert "NaN" in str(outcomes[0]) and all(map(untouched, peers))


@within(3600)
async def test_one_that_brings_another_weight_to_the_second_phase_fails_the_round_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Averagers(7) as swarm:
        peers = [await add(swarm, value) for value in (1.0, 5.0, 3.0)]
        helper = await add(swarm, 0.0, auxiliary=True)
        liar = peers[2]
        made = Inputs.__init__

        def lie(self: Inputs, tensors: list[torch.Tensor], weight: float, *others: object) -> None:
            own = float(tensors[0].flatten()[0]) == 9.0  # only the liar brings that, to the second phase
            made(self, tensors, 2.0 if own else weight, *others)  # type: ignore[arg-type]

        monkeypatch.setattr(Inputs, "__init__", lie)
        outcomes = await all_outcomes([peer.begin(allow_retries=False) for peer in [*peers, helper]])
        assert all(isinstance(outcome, RoundFailed) for outcome in outcomes), outcomes
        failed = outcomes[0]
        assert isinstance(failed, RoundFailed) and failed.suspects == (liar.peer_id,)
        assert all(map(untouched, [*peers, helper]))


@pytest.mark.parametrize("step", [0, 1])
@within(3600)
async def test_one_that_loses_sight_of_a_step_is_undecided_and_the_others_go_on(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Averagers(8) as swarm:
        values = {await add(swarm, value): (value, 1.0) for value in (1.0, 5.0, 3.0, 7.0)}
        peers = list(values)
        lost = peers[-1]
        rest = frozenset(peer.peer_id for peer in peers[:-1])
        strike_in_step(monkeypatch, step, lost, lambda: swarm.network.partition(rest, [lost.peer_id]))
        outcomes = await all_outcomes([peer.begin(allow_retries=peer is not lost) for peer in peers])
        assert isinstance(outcomes[-1], RoundUndecided) and untouched(lost)
        assert isinstance(outcomes[0], RoundResult)
        check(peers[:-1], values, outcomes[0])


@within(3600)
async def test_a_phase_has_an_id_of_its_own_and_leaves_nothing_behind() -> None:
    async with Averagers(12) as swarm:
        peers = [await add(swarm, value) for value in (1.0, 5.0)]
        (group, _) = [result.group for result in await all_results([peer.begin() for peer in peers])]
        assert len({each.group_id for each in phases_of(group)}) == 4
        assert phases_of(group)[3].members == group.members
        assert not peers[0].core._service._expected and not peers[0].core._service._exchanges
