"""The group that stands while an epoch is computed."""

import asyncio
from types import SimpleNamespace

import torch

from swarmcli.averaging import AveragerCore, RoundResult
from swarmcli.errors import RoundFailed
from swarmcli.events import Noticed
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.epoch.group import PreformedGroup
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.state.lineage import LineagePosition
from tests.optim.optim_swarm import TARGET, Swarm, record
from tests.simulation import now, simulated, within

HERE = LineagePosition(0, 0, bytes([7]) * 32)


class Member:
    """A peer with a group and one number to average."""

    def __init__(self, node, value: float, reported: int = 0) -> None:
        self.tensor = torch.tensor([value])
        self.averager = AveragerCore([self.tensor], node, averager_config(OptimizerConfig("run", TARGET)))
        self.tasks = TaskOwner()
        config = OptimizerConfig("run", TARGET)
        tracker = SimpleNamespace(reported=lambda epoch: {node.peer_id: float(reported)})
        self.group = PreformedGroup(self.averager, config, self.tasks, tracker)  # type: ignore[arg-type]

    async def __aenter__(self) -> "Member":
        await self.averager.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.group.close()
        await self.tasks.close()
        await self.averager.shutdown()


@simulated
async def test_it_begins_when_the_sum_is_reached_and_weighs_by_samples() -> None:
    async with Swarm() as swarm, Member(await swarm.node(), 1.0) as one, Member(await swarm.node(), 4.0) as other:
        for member in (one, other):
            member.group.open(HERE)
        one.group.report(TARGET // 3)
        await asyncio.sleep(30)
        assert not one.group.begun and not other.group.begun
        other.group.report(2 * TARGET // 3)
        assert all(await asyncio.gather(*(m.group.wait_until_begun(5) for m in (one, other))))
        outcomes = await asyncio.gather(
            one.group.contribute(Weighed.of(TARGET // 3)), other.group.contribute(Weighed.of(2 * TARGET // 3))
        )
        assert isinstance(outcomes[0], RoundResult) and isinstance(outcomes[1], RoundResult)
        assert outcomes[0].samples == outcomes[1].samples and outcomes[0].total_samples == TARGET
        assert one.tensor.item() == other.tensor.item() == 3.0


@simulated
async def test_groups_of_other_lineages_do_not_mix() -> None:
    async with Swarm() as swarm, Member(await swarm.node(), 1.0) as one, Member(await swarm.node(), 4.0) as other:
        one.group.open(HERE)
        other.group.open(LineagePosition(0, 0, bytes([8]) * 32))
        for member in (one, other):
            member.group.report(TARGET)
        assert not any(await asyncio.gather(*(m.group.wait_until_begun(20) for m in (one, other))))


@within(200)
async def test_after_a_member_died_the_others_step_with_what_they_have() -> None:
    async with Swarm() as swarm:
        nodes = [await swarm.node() for _ in range(3)]
        async with Member(nodes[0], 1.0) as one, Member(nodes[1], 4.0) as other, Member(nodes[2], 9.0) as third:
            for member in (one, other, third):
                member.group.open(HERE)
                member.group.report(TARGET)
            assert all(await asyncio.gather(*(m.group.wait_until_begun(5) for m in (one, other, third))))
            swarm.network.kill(nodes[0].peer_id)  # it has nothing to reduce
            first, second = await asyncio.gather(*(m.group.contribute(Weighed.of(TARGET // 2)) for m in (other, third)))
            assert isinstance(first, RoundResult) and isinstance(second, RoundResult)
            assert first.round_id == second.round_id and first.total_samples == second.total_samples == TARGET
            assert set(first.contributors) == {nodes[1].peer_id, nodes[2].peer_id}
            assert other.tensor.item() == third.tensor.item() == 6.5


@within(200)
async def test_after_a_round_that_gave_nothing_it_forms_again_with_the_same_samples() -> None:
    async with Swarm() as swarm, Member(await swarm.node(), 1.0) as one, Member(await swarm.node(), 4.0) as other:
        for member in (one, other):
            member.group.open(HERE)
            member.group.report(TARGET)
        assert all(await asyncio.gather(*(m.group.wait_until_begun(5) for m in (one, other))))
        outcomes = await asyncio.gather(one.group.contribute(Weighed()), other.group.contribute(Weighed()))
        assert all(isinstance(outcome, RoundFailed) for outcome in outcomes)
        assert all(await asyncio.gather(*(m.group.wait_until_begun(30) for m in (one, other))))
        again = await asyncio.gather(*(m.group.contribute(Weighed.of(TARGET // 2)) for m in (one, other)))
        assert all(isinstance(outcome, RoundResult) for outcome in again)
        assert one.tensor.item() == other.tensor.item() == 2.5


@simulated
async def test_once_closed_nothing_can_be_contributed() -> None:
    async with Swarm() as swarm, Member(await swarm.node(), 1.0) as one:
        one.group.open(HERE)
        one.group.open(HERE)
        assert one.group.position == HERE
        await one.group.close()
        await one.group.close()
        assert isinstance(await one.group.contribute(Weighed.of(1)), RoundFailed)
        assert one.group.position is None


@simulated
async def test_a_peer_that_has_left_the_run_looks_for_no_group() -> None:
    """A step that is under way meanwhile asks for the next group, from an averager that has shut down."""
    async with Swarm() as swarm, Member(await swarm.node(), 1.0) as one:
        faults = record(one.averager.node, Noticed)
        one.group.open(HERE)
        await one.group.leave()
        await one.averager.shutdown()
        one.group.open(HERE)
        assert not await one.group.wait_until_begun(10) and one.group.position is None
        assert not faults


@simulated
async def test_work_goes_on_unless_the_round_begins() -> None:
    async with Swarm() as swarm, Member(await swarm.node(), 1.0) as one, Member(await swarm.node(), 4.0) as other:

        async def work() -> str:
            await asyncio.sleep(3)
            return "done"

        for member in (one, other):
            member.group.open(HERE)
        assert await one.group.unless_begun(work()) == "done"
        one.group.report(TARGET)
        assert await one.group.unless_begun(work()) is None
        assert one.group.begun


@within(600)
async def test_suspicions_of_everyone_who_has_samples_do_not_keep_the_round_from_beginning() -> None:
    """A follower and its company, who have none, would wait for each other for good, and so would those who have."""
    async with Swarm() as swarm:
        made = [Member(await swarm.node(), value, TARGET) for value in (0.0, 0.0, 1.0, 4.0)]
        async with made[0] as follower, made[1], made[2] as one, made[3] as other:
            samples = [0, 0, TARGET / 2, TARGET / 2]
            assert await _average(made, samples, HERE) == {2.5}
            known = {each: each.averager.node.peer_id for each in made}
            for wary, suspect in ((follower, one), (follower, other), (one, other), (other, one)):
                wary.averager.trust.suspect(known[suspect], "it was too slow")
            assert len(await _average(made, samples, LineagePosition(1, 0, bytes([8]) * 32))) == 1


async def _average(members: list[Member], samples: list[float], position: LineagePosition) -> set[float]:
    """Runs the round of this position, which all commit within seconds; returns what they hold after it."""
    for member, own in zip(members, samples, strict=True):
        await member.group.close()
        member.group.open(position)
        member.group.report(own)
    began = now()
    while not all(await asyncio.gather(*(member.group.wait_until_begun(1.0) for member in members))):
        assert now() - began < 30, "the round does not begin"
    outcomes = await asyncio.gather(
        *(m.group.contribute(Weighed(int(own), own)) for m, own in zip(members, samples, strict=True))
    )
    assert all(isinstance(outcome, RoundResult) for outcome in outcomes)
    return {member.tensor.item() for member in members}
