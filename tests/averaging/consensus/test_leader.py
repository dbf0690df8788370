"""Members die and freeze at each step of a round and of its second try; the others share one outcome."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.config import AllreduceOptions, Trust
from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.errors import RoundUndecided
from swarmcli.testing import virtual_time
from tests.averaging.injection import Steps, chosen, play
from tests.averaging.rounds import Kind, Swarm

GROUPS = {
    "trainers": [Kind(), Kind(weight=2), Kind(), Kind(weight=3), Kind(bandwidth=0)],
    "auxiliaries": [Kind(), Kind(auxiliary=True), Kind(weight=2), Kind(auxiliary=True), Kind(auxiliary=True)],
    "behind firewalls": [Kind(), Kind(weight=2), Kind(listening=False), Kind(), Kind(listening=False)],
}


FAULTS: list[tuple[str, str, Trust]] = [
    ("trainers", "kill", "strangers"),
    ("auxiliaries", "kill", "members"),  # with two of five that have tensors no group is guarded
    ("behind firewalls", "freeze", "strangers"),
    ("trainers", "freeze", "members"),
    ("trainers", "freeze", "strangers"),
    ("behind firewalls", "kill", "strangers"),
    ("behind firewalls", "kill", "members"),
]


@pytest.mark.soak  # `test_chaos.py` draws such faults in `make test`
@pytest.mark.parametrize(
    ("group", "what", "trust", "victim"),
    [(*fault, victim) for fault in FAULTS for victim in range(5)],
)
def test_one_fault_at_each_step(group: str, what: str, trust: Trust, victim: int) -> None:
    kinds, undisturbed = GROUPS[group], Steps()
    whole = play(kinds, undisturbed, [], trust=trust)
    assert all(isinstance(outcome, AllreduceResult) for outcome in whole.outcomes)
    for number in chosen(undisturbed.seen):
        play(kinds, Steps(at=number), [(what, victim)], trust=trust).check()


@pytest.mark.soak
@pytest.mark.parametrize("what", ["kill", "freeze"])
@pytest.mark.parametrize(
    ("victim", "kinds"), [(0, "trainers"), (1, "auxiliaries"), (2, "behind firewalls"), (4, "trainers")]
)
def test_a_second_fault_at_each_step_of_a_second_try(victim: int, kinds: str, what: str) -> None:
    group, disturbed = GROUPS[kinds], Steps()
    play(group, disturbed, [("kill", 3), (what, victim)], first_at=0.1, trust="members").check()
    assert any("prepare" in step for step, _ in disturbed.seen)
    for number in chosen(disturbed.seen):
        play(group, Steps(at=number), [("kill", 3), (what, victim)], 0.1, "members").check()


@pytest.mark.soak
@pytest.mark.parametrize("what", ["kill", "freeze"])
@pytest.mark.parametrize("victim", range(1, 5))
def test_a_second_fault_at_each_step_after_the_leaders_death(victim: int, what: str) -> None:
    kinds, led = GROUPS["trainers"], Steps()
    play(kinds, led, [("kill", 0), (what, victim)], first_at=0.1, trust="members").check()
    assert any("prepare" in step for step, _ in led.seen)
    for number in chosen(led.seen):
        play(kinds, Steps(at=number), [("kill", 0), (what, victim)], 0.1, "members").check()


@pytest.mark.parametrize(("how", "least", "most"), [("kill", 0.0, 15.0), ("close", 0.0, 15.0), ("cut", 30.0, 70.0)])
def test_who_is_left_alone_waits_for_those_that_may_come_back_not_for_those_that_are_gone(
    how: str, least: float, most: float
) -> None:
    """Whoever closes its averager may stay connected, as a script that tries out its model does."""

    async def main() -> None:
        options = AllreduceOptions(part_size_bytes=512)
        async with Swarm([Kind(), Kind(), Kind()], bandwidth=20_000.0, options=options) as swarm:

            def lose(index: int) -> None:
                match how:
                    case "kill":
                        swarm.kill(index)
                    case "close":
                        swarm.close(index)
                    case "cut":
                        swarm.network.cut(swarm.peers[index].peer_id, swarm.peers[2].peer_id)

            async def leave_alone() -> None:
                await asyncio.sleep(0.2)
                for index in (0, 1):
                    lose(index)
                began = asyncio.get_running_loop().time()
                await asyncio.wait([swarm.tasks[2]])
                assert least <= asyncio.get_running_loop().time() - began <= most

            outcomes = await swarm.round(leave_alone)
            assert isinstance(outcomes[2], RoundUndecided)
            swarm.check(outcomes)

    virtual_time.run(main(), timeout=2000)
