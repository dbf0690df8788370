"""Members die and freeze at each step of a round, of its agreement and of a repair; the others share one outcome."""

from __future__ import annotations

import pytest

from swarmcli.averaging.results import AllreduceResult

from .injection import Steps, chosen, play
from .rounds import Kind

GROUPS = {
    "trainers": [Kind(), Kind(weight=2), Kind(), Kind(weight=3), Kind(bandwidth=0)],
    "auxiliaries": [Kind(), Kind(auxiliary=True), Kind(weight=2), Kind(auxiliary=True), Kind(auxiliary=True)],
    "behind firewalls": [Kind(), Kind(weight=2), Kind(listening=False), Kind(), Kind(listening=False)],
}


@pytest.mark.parametrize("what", ["kill", "freeze"])
@pytest.mark.parametrize("victim", range(5))
@pytest.mark.parametrize("kinds", GROUPS.values(), ids=GROUPS.keys())
def test_one_fault_at_each_step(kinds: list[Kind], victim: int, what: str) -> None:
    undisturbed = Steps()
    assert all(isinstance(outcome, AllreduceResult) for outcome in play(kinds, undisturbed, []).outcomes)
    for number in chosen(undisturbed.seen):
        play(kinds, Steps(at=number), [(what, victim)]).check()


@pytest.mark.parametrize("what", ["kill", "freeze"])
@pytest.mark.parametrize(
    ("victim", "kinds"), [(0, "trainers"), (1, "auxiliaries"), (2, "behind firewalls"), (4, "trainers")]
)
def test_a_second_fault_at_each_step_of_a_repair(victim: int, kinds: str, what: str) -> None:
    group, repaired = GROUPS[kinds], Steps()
    play(group, repaired, [("kill", 3), (what, victim)], first_at=0.1).check()
    assert any("repair" in step for step, _ in repaired.seen)
    for number in chosen(repaired.seen):
        play(group, Steps(at=number), [("kill", 3), (what, victim)], first_at=0.1).check()


@pytest.mark.parametrize("what", ["kill", "freeze"])
@pytest.mark.parametrize("victim", range(1, 5))
def test_a_second_fault_at_each_step_after_the_leaders_death(victim: int, what: str) -> None:
    kinds, led = GROUPS["trainers"], Steps()
    play(kinds, led, [("kill", 0), (what, victim)], first_at=0.1).check()
    assert any("prepare" in step for step, _ in led.seen)
    for number in chosen(led.seen):
        play(kinds, Steps(at=number), [("kill", 0), (what, victim)], first_at=0.1).check()
