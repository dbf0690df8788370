"""The outcome of a round under every order of messages that a seed draws: with deaths, freezes, cuts and liars, no two
results, and nobody takes for dead what has a result or may yet have one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from swarmcli.averaging import certificate
from swarmcli.averaging.group import Group
from swarmcli.averaging.round import outcome
from swarmcli.averaging.round.outcome import Action, RoundOutcome
from tests.averaging.outcome import model
from tests.suites import soak


@pytest.fixture(autouse=True)
def quick_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "verify", model.verify)
    monkeypatch.setattr(certificate, "verify", model.verify)


def drawn(seed: int, kind: type[RoundOutcome] = RoundOutcome) -> Counter[Action]:
    """Runs one drawn round; counts how many of its members ended how."""
    random_ = random.Random(seed)
    size, trust = random_.choice([1, 2, 3, 4, 4, 5, 7]), random_.choice(["strangers", "members"])
    hostile = (size - 1) // 3 if trust == "strangers" and size >= certificate.LEAST_GUARDED else 0
    round_ = model.Round(
        size,
        random_,
        liars=random_.randint(0, hostile),
        trust=trust,  # type: ignore[arg-type]
        deaths=random_.choice([0, 0, 1, 2]),
        unlike=random_.choice([0, 0, 0.4]) if hostile else 0,
        lost_parts=random_.choice([0, 0.2, 0.5]),
        cuts=random_.choice([0, 0.1, 0.4]),
        freezes=random_.choice([0, 0.5]),
        kind=kind,
    )
    for _ in range(random_.randrange(25 * size)):
        round_.step()
    round_.check()
    round_.settle()
    round_.check()
    return round_.ends


def test_no_order_of_messages_gives_two_results() -> None:
    ends = sum((drawn(seed) for seed in range(120)), Counter[Action]())
    assert set(ends) == {Action.COMMITTED, Action.DEAD, Action.UNDECIDED}


@pytest.mark.parametrize("part", soak(range(20)))
def test_no_order_of_messages_gives_two_results_at_length(part: int) -> None:
    for seed in range(1000 * (part + 1), 1000 * (part + 2)):
        drawn(seed)


class SmallQuorum(certificate.Quorum):
    @property
    def to_decide(self) -> int:
        return self.total // 2 + 1


class MajorityDecides(RoundOutcome):
    """A faulty rule: more than half of the members are enough, though some lie."""

    def __init__(self, group: Group, *args: Any, **kwargs: Any) -> None:
        super().__init__(group, *args, **kwargs)
        self.quorum = SmallQuorum(len(group), trust=self.quorum.trust)


class VotesUnechoed(RoundOutcome):
    """A faulty rule: strangers vote as members do. Then liars split the votes of the others."""

    def can_vote(self, digest: bytes) -> bool:
        return not self.closed


class FewGiveUps(RoundOutcome):
    """A faulty rule: a list is taken for dead one vote too early."""

    @property
    def dead(self) -> bool:
        gave_up = self._words.get(("give-up", certificate.NOTHING), {})
        return self.quorum.weight(gave_up) >= self.quorum.total - self.quorum.to_decide + self.quorum.hostile > 0


@pytest.mark.parametrize("mistake", [MajorityDecides, VotesUnechoed, FewGiveUps])
def test_the_model_finds_mistakes(mistake: type[RoundOutcome]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(300, 2000):
            drawn(seed, mistake)


@pytest.mark.parametrize(
    ("size", "trust"), [(2, "strangers"), (3, "strangers"), (4, "strangers"), (7, "strangers"), (4, "members")]
)
def test_all_that_hold_a_result_and_reach_each_other_commit(size: int, trust: certificate.Trust) -> None:
    round_ = model.Round(size, random.Random(1), trust=trust, lost_parts=0, cuts=0)
    round_.settle()
    assert round_.ends == {Action.COMMITTED: size}


@pytest.mark.parametrize(("size", "dead"), [(4, 1), (7, 2), (16, 5)])
def test_as_many_may_die_as_may_lie(size: int, dead: int) -> None:
    """Only one of those who are left holds the result: the others fetch it."""
    round_ = model.Round(size, random.Random(1), lost_parts=0, cuts=0)
    for index in range(size):
        round_.nodes[index].gone = index < dead
        round_.holds[index] = model.RESULTS[0] if index == dead else None
    round_.settle()
    assert round_.ends == {Action.COMMITTED: size - dead}


@pytest.mark.parametrize(
    ("size", "trust", "lost"), [(2, "members", 1), (3, "members", 1), (4, "members", 2), (4, "strangers", 1)]
)
def test_a_list_is_dead_at_once_where_nobody_holds_the_result(size: int, trust: certificate.Trust, lost: int) -> None:
    round_ = model.Round(size, random.Random(1), trust=trust, lost_parts=1, cuts=0)
    for index in range(lost):
        round_.nodes[index].gone = True
    round_.settle()
    assert round_.ends == {Action.DEAD: size - lost}
