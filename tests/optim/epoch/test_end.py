"""The end of an epoch step by step: when the trainer may go on, what is handed in how often, what is given back."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.round.result import Outcome
from swarmcli.errors import OptimizerError, RoundFailed, RoundUndecided
from swarmcli.events import Events, Noticed
from swarmcli.network.identity import PeerID
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.epoch.end import EpochEnd
from swarmcli.optim.epoch.group import EpochRule
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.modes.base import Timing
from swarmcli.optim.peers.report import PeerMetrics
from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.testing import virtual_time

OWN, OTHER = PeerID(bytes(32)), PeerID(bytes([1]) * 32)
TOGETHER = RoundResult(round_id=bytes(32), samples={OWN: 12.0, OTHER: 12.0})
WITHOUT_ME = RoundResult(round_id=bytes(32), samples={OTHER: 12.0}, left_out={OWN: "silent"})


class Story:
    """Stands in for replica, work, group and directory, and writes down what is asked of them."""

    undecided = ""
    if_undecided = "they wait"
    company: ClassVar[list[PeerID]] = []
    position = LineagePosition(3, 72, bytes(32))

    def __init__(
        self, timing: Timing, outcomes: Sequence[Outcome | RuntimeError], samples: int = 12, **options: bool
    ) -> None:
        self.told: list[str] = []
        self.warnings: list[str] = []
        self.weights: list[float] = []
        self.samples = samples
        self.begun = True
        self.broken: Exception | None = None
        self.answering = True
        self.outcomes = list(outcomes)
        self.replica = self.directory = self.claims = self.finder = self
        self.mode, self.rule = SimpleNamespace(timing=timing), EpochRule(SimpleNamespace(target_batch_size=24))
        self.config = OptimizerConfig("run", 24, **options)
        self.node = SimpleNamespace(peer_id=OWN)
        self.events = Events()
        self.events.subscribe(lambda event: self.warnings.append(event.text) if isinstance(event, Noticed) else None)
        metrics = PeerMetrics(OWN, self.events)
        self.end = EpochEnd(self, self, self, self, self, metrics)  # type: ignore[arg-type]

    async def run(self) -> None:
        tasks = TaskOwner()
        self.end.begin(tasks, self._end_epoch())
        try:
            await self.end.may_compute()
            self.told.append("resume")
            await self.end.over()
        finally:
            await tasks.close()

    async def _end_epoch(self) -> None:
        if (advanced := await self.end.run()) is not None:
            self.told.append(f"at the next epoch with {advanced.own_samples} of {advanced.committed.total_samples}")

    # who else is there

    def is_there(self, peer: PeerID) -> bool:
        return self.answering

    def holders(self) -> list[PeerID]:
        return [OTHER]

    # the replica

    async def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    async def publish(self) -> None:
        self.told.append("publish")
        await asyncio.sleep(0)

    # the work

    async def freeze(self) -> Weighed:
        self.told.append("hand in")
        await asyncio.sleep(0)
        return Weighed(self.samples, float(self.samples))

    async def restore(self) -> None:
        self.told.append("take back")

    async def set_aside(self) -> None:
        self.told.append("set aside")

    async def advance(self, committed: RoundResult) -> None:
        await asyncio.sleep(1)
        self.told.append(f"advance{'' if committed.samples.get(OWN) else ' without own'}")

    # the keeper of the state

    async def after_epoch(self, committed: RoundResult, weight: float) -> None:
        self.told.append("keep states together")

    # the group

    async def contribute(self, handed: Weighed) -> Outcome:
        await asyncio.sleep(1)
        self.weights.append(handed.weight)
        self.told.append("round")
        await asyncio.sleep(1)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, RuntimeError):
            raise outcome
        self.begun = bool(self.outcomes)
        return outcome

    async def wait_until_begun(self, timeout: float) -> bool:
        if not self.begun:
            await asyncio.sleep(timeout)
        return self.begun

    async def close(self) -> None:
        self.begun = False

    # directory

    unreachable = 0

    def credible(self) -> list[PeerID]:
        return [OTHER] * self.unreachable

    def is_away(self, peer: PeerID) -> bool:
        return False

    def announce(self) -> None:
        pass


def tell(timing: Timing, *outcomes: Outcome | RuntimeError, samples: int = 12) -> Story:
    story = Story(timing, outcomes, samples)
    virtual_time.run(story.run())
    return story


def test_samples_that_round_to_none_end_an_epoch_too() -> None:
    story = tell(Timing.AT_ONCE, RoundResult(round_id=bytes(32), samples={OWN: 0.4}), samples=1)
    assert "advance" in story.told


@pytest.mark.parametrize(
    ("timing", "told"),
    [
        (Timing.AT_ONCE, "hand in, round, advance, keep states together, publish, take back, next, resume"),
        (Timing.DELAYED_STEP, "hand in, publish, round, resume, advance, keep states together, take back, next"),
        (Timing.DELAYED_AVERAGING, "hand in, publish, resume, round, advance, keep states together, take back, next"),
    ],
)
def test_the_trainer_waits_for_what_its_timing_says(timing: Timing, told: str) -> None:
    story = tell(timing, TOGETHER)
    assert ", ".join(story.told).replace("at the next epoch with 12 of 24", "next") == told


@pytest.mark.parametrize("timing", Timing)
def test_a_failed_round_is_tried_again_with_the_same(timing: Timing) -> None:
    story = tell(timing, RoundFailed("a"), RoundFailed("b"), TOGETHER)
    assert story.weights == [12, 12, 12]
    assert story.told.count("advance") == 1
    assert story.told.count("publish") == 1
    assert "take back" not in story.told[: story.told.index("advance")]
    waits = "this peer's samples wait for the next round"
    assert story.warnings == [f"the round at epoch 3 gave no result: {why}; {waits}" for why in "ab"]


@pytest.mark.parametrize("timing", Timing)
@pytest.mark.parametrize(
    ("outcome", "done"), [(RoundFailed("nobody there"), "take back"), (RoundUndecided("cut off"), "set aside")]
)
def test_what_a_dead_round_had_is_given_back_and_what_an_undecided_one_had_is_not(
    timing: Timing, outcome: Outcome, done: str
) -> None:
    story = tell(timing, outcome)
    assert "advance" not in story.told
    assert next(each for each in story.told if each in ("take back", "set aside")) == done
    assert "resume" in story.told
    assert story.warnings[0].endswith("; they wait") == isinstance(outcome, RoundUndecided)


def test_a_round_that_everybody_else_has_left_is_no_warning() -> None:
    for company, warnings in ((True, 1), (False, 0)):
        story = Story(Timing.AT_ONCE, [RoundUndecided("no quorum")])
        story.answering = company
        virtual_time.run(story.run())
        assert len(story.warnings) == warnings


@pytest.mark.parametrize("timing", Timing)
def test_an_error_gives_back_and_lets_the_trainer_go(timing: Timing) -> None:
    story = Story(timing, [RuntimeError("the disk is full")])
    with pytest.raises(RuntimeError, match="disk"):
        virtual_time.run(story.run())
    assert "take back" in story.told


@pytest.mark.parametrize("timing", Timing)
def test_what_must_not_be_changed_is_looked_at_before_anything_is_handed_in(timing: Timing) -> None:
    story = Story(timing, [TOGETHER])
    story.broken = OptimizerError("parameter 1 has become another")
    with pytest.raises(OptimizerError, match="parameter 1"):
        virtual_time.run(story.run())
    assert "hand in" not in story.told and "take back" in story.told


@pytest.mark.parametrize("timing", Timing)
def test_a_cancelled_end_gives_back(timing: Timing) -> None:
    story = Story(timing, [TOGETHER])

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(story.run())
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    virtual_time.run(main())
    assert "take back" in story.told


@pytest.mark.parametrize("timing", Timing)
def test_a_round_without_this_peer_is_said_aloud(timing: Timing) -> None:
    story = tell(timing, WITHOUT_ME)
    assert "advance without own" in story.told
    assert "at the next epoch with 0 of 12" in story.told
    assert story.warnings == ["12 samples of this peer are not in the average: silent"]


class Unanswered(Story):
    """A story in which others train on this lineage, but no round begins."""

    def __init__(self, **options: bool) -> None:
        super().__init__(Timing.AT_ONCE, [], 24, **options)
        self.begun = False
        self.averager = self.finder = self

    async def unless_begun(self, work: Coroutine[Any, Any, str]) -> str:
        return await work

    around = "company"

    async def surroundings(self, position: LineagePosition, *, starts: bool = False) -> str:
        return self.around

    async def average_alone(self) -> None:
        self.told.append("average alone")

    @asynccontextmanager
    async def tensors(self) -> AsyncIterator[list[torch.Tensor]]:
        yield []


@pytest.mark.parametrize("proceed_alone", [True, False])
def test_without_a_round_a_peer_steps_by_itself_only_if_it_is_told_to(proceed_alone: bool) -> None:
    story = Unanswered(proceed_alone=proceed_alone)
    virtual_time.run(story.run())
    assert ("advance" in story.told) == proceed_alone
    assert any("no round came about within 15 s" in warning for warning in story.warnings) == proceed_alone


def test_stepping_alone_beside_peers_that_do_not_answer_is_said_once() -> None:
    story = Unanswered()
    story.around, story.unreachable = "alone", 2

    async def main() -> None:
        for _ in range(3):
            await story.run()

    virtual_time.run(main())
    assert story.told.count("average alone") == 3
    assert len(story.warnings) == 1 and "2 other peers have reported lately" in story.warnings[0]


def test_who_is_alone_needs_no_warning() -> None:
    story = Unanswered()
    story.around = "alone"
    virtual_time.run(story.run())
    assert story.warnings == []
