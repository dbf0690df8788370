"""Rank 0 and the others take the same steps, end after the same one, and end together when one of them fails."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swarmcli.errors import SiteError
from swarmcli.sites import gradients, steps
from swarmcli.sites.commands import LeaderCommands
from swarmcli.sites.gradients import SiteAccumulator
from swarmcli.sites.site import Site
from swarmcli.sites.steps import SiteLeader, SiteMember
from tests.sharding.processes import Worlds
from tests.sharding.threads import in_threads, ranks

LAST = 5  # epoch of the run


class Swarm:
    """In the place of rank 0's Optimizer: an epoch has `per_epoch` samples, and nobody else takes part."""

    opt = None

    def __init__(self, net: nn.Module, sums: SiteAccumulator, per_epoch: int = 8) -> None:
        self._net, self._per_epoch = net, per_epoch
        self._sums = sums
        self.local_epoch = 0
        self.batches: list[int] = []
        self.losses: list[tuple[float, int]] = []
        self.on_step: Callable[[], Any] = lambda: None

    def step(self, *, batch_size: int, weight: float | None = None) -> None:
        self.batches.append(batch_size)
        self.on_step()
        if batch_size:
            self._sums.add(batch_size, weight=weight)
        if self._sums.samples >= self._per_epoch:
            self._sums.freeze()
            self._sums.settle()
            self.local_epoch += 1
            for parameter, mean in zip(self._net.parameters(), self._sums.means, strict=True):
                parameter.data -= mean  # which tensors do not tell

    def note_loss(self, loss: float, samples: int) -> None:
        self.losses.append((loss, samples))

    def zero_grad(self) -> None:
        self._net.zero_grad()

    def load_state_from_peers(self) -> bool:
        return False


class Trainer:
    """One rank, whose gradients are `rank + 1` in every step."""

    def __init__(self, *, seconds: float = 10.0, net: nn.Module | None = None) -> None:
        self.site = Site.form(timeout=seconds)
        self.rank = self.site.rank
        self.net = net or nn.Linear(3, 2)
        self.wants_to_stop = threading.Event()
        self.swarm: Swarm | None = None
        self.steps: Any
        if self.rank == 0:
            self.commands = LeaderCommands(self.site)
            parameters = list(self.net.parameters())
            sums = SiteAccumulator(self.commands, parameters)
            self.swarm = Swarm(self.net, sums)
            optimizer: Any = self.swarm
            self.steps = SiteLeader(
                self.commands,
                optimizer,
                self.net,
                parameters,
                sums,
                wants_to_stop=self.wants_to_stop,
                has_ended=lambda: optimizer.local_epoch == LAST,
            )
        else:
            self.steps = SiteMember(self.site, self.net, list(self.net.parameters()), wants_to_stop=self.wants_to_stop)
        self.steps.load_state_from_peers()

    def fail(self) -> None:
        """In the next step, at this rank."""

        def fail(samples: int) -> None:
            raise KeyError("of its own")

        if self.swarm:
            self.swarm.on_step = lambda: fail(0)
        else:
            self.steps._sums.add = fail

    def step(self, samples: int = 1) -> None:
        self.steps.zero_grad()
        for parameter in self.net.parameters():
            parameter.grad = torch.full_like(parameter, self.rank + 1.0)
        self.steps.note_loss(float(self.rank), samples)
        self.steps.step(batch_size=samples)

    def weights(self) -> torch.Tensor:
        state = self.net.state_dict().values()
        return torch.cat([each.double().flatten() for each in state])


@ranks(2)
def test_all_stop_where_rank_0_finds_the_run_ended_and_have_what_its_model_is_then() -> None:
    trainer = Trainer()
    with trainer.steps:
        while not trainer.steps.stopped.is_set():
            trainer.step(4)
        assert trainer.steps.local_epoch == LAST
        if trainer.rank == 0:  # an average came in when the last step was over
            for parameter in trainer.net.parameters():
                parameter.data.fill_(7.0)
                parameter.detach().add_(1.0)
    assert set(trainer.weights().tolist()) == {8.0}


@pytest.mark.parametrize("who", [0, 2])
@ranks(3)
def test_all_stop_after_the_same_step_whoever_wants_to(who: int) -> None:
    trainer = Trainer()
    with trainer.steps:
        taken = 0
        while not trainer.steps.stopped.is_set():
            if taken == 5 and trainer.rank == who:
                trainer.wants_to_stop.set()
            trainer.step()
            taken += 1
        assert (taken, trainer.steps.local_epoch) == (6, 2)


@pytest.mark.parametrize(
    ("lengths", "batches"), [((2, 4), [2, 2, 1, 1, 0]), ((3, 1), [2, 1, 1, 0]), ((2, 2), [2, 2, 0])], ids=str
)
@ranks(2)
def test_a_rank_without_data_stays_until_all_are(lengths: tuple[int, ...], batches: list[int]) -> None:
    trainer = Trainer()
    with trainer.steps:
        for _ in range(lengths[trainer.rank]):
            trainer.step()
        trainer.steps.drain()
        assert trainer.steps.stopped.is_set()
        assert trainer.steps.local_epoch == 0
        assert trainer.swarm is None or trainer.swarm.batches == batches


@ranks(2)
def test_the_swarm_sees_the_mean_loss_of_all_samples() -> None:
    trainer = Trainer()
    with trainer.steps:
        trainer.step(3 if trainer.rank == 0 else 1)
        assert trainer.swarm is None or trainer.swarm.losses == [(0.25, 4)]


def train_a_model_with_buffers() -> list[torch.Tensor]:
    """Its ranks begin with other weights, a part of them frozen, and see other data."""
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, dtype=torch.float32))
    net.append(nn.Linear(1, 1, bias=False).requires_grad_(False).to(torch.bfloat16))
    trainer = Trainer(net=net)
    seen = [trainer.weights()]
    with trainer.steps:
        for _ in range(8):
            net[:3](torch.randn(4, 3))
            trainer.step(2)
            if trainer.steps.local_epoch == len(seen):
                seen.append(trainer.weights())
        assert trainer.steps.local_epoch == 4
    return seen


def test_after_each_epoch_all_have_the_parameters_and_buffers_of_rank_0() -> None:
    first, other = in_threads(2, train_a_model_with_buffers)
    assert len(first) == len(other) == 5
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1])


@ranks(2)
def test_the_end_of_training_survives_a_rank_that_has_gone_already() -> None:
    """Rank 1 does not stay for its commands."""
    trainer = Trainer()
    if trainer.rank:
        trainer.site.close(broken=True)
        dist.barrier()
        return
    warnings: list[str] = []
    monkey = pytest.MonkeyPatch()
    monkey.setattr(steps.logger, "warning", lambda text, error: warnings.append(str(error)))
    dist.barrier()
    trainer.steps.close()
    monkey.undo()
    assert len(warnings) == 1 and warnings[0].startswith("rank 1 is gone")


@pytest.mark.parametrize("who", [0, 1])
@ranks(3)
def test_a_rank_that_fails_keeps_nobody_waiting_even_if_it_lives_on(who: int) -> None:
    """Rank `who` fails in a step, and goes on to live."""
    trainer = Trainer(seconds=1000.0)
    with pytest.raises(KeyError if trainer.rank == who else SiteError), trainer.steps:
        trainer.step()
        if trainer.rank == who:
            trainer.fail()
        try:
            trainer.step()
        finally:
            dist.barrier()  # of the world, which no site breaks


def fail_in_a_step(who: int, how: str) -> str:
    """`how` rank `who` ends in its third step, or as sums are gathered; the error of the others."""
    trainer, monkey = Trainer(seconds=0.5 if how == "freezes" else 1000.0), pytest.MonkeyPatch()
    processes = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(processes, torch.tensor([os.getpid()]))
    number = signal.SIGSTOP if how == "freezes" else signal.SIGKILL
    if trainer.rank == who and how == "gather dies":
        monkey.setattr(gradients, "sum_over_ranks", lambda *_: os.kill(os.getpid(), number))
    try:
        with trainer.steps:
            for turn in range(4):
                if turn == 2 and trainer.rank == who and how != "gather dies":
                    os.kill(os.getpid(), number)
                trainer.step()
    except SiteError as error:
        if how == "freezes" and trainer.rank == 0:
            os.kill(int(processes[who]), signal.SIGKILL)  # as the launcher would
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


ENDS = [
    (0, "dies", ""),
    (1, "freezes", "rank 1 is gone, or sent nothing within 0.5 s: Timed out"),
    (1, "gather dies", "the gradients of this site did not come together"),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("who", "how", "words"), ENDS)
def test_whoever_fails_the_others_end_with_a_site_error(worlds: Worlds, who: int, how: str, words: str) -> None:
    outcomes = worlds(3, grouped=False).outcomes(fail_in_a_step, who, how)
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert outcome.value is not None, outcome.error
            assert outcome.value.startswith("SiteError: ") and "gloo" not in outcome.value, outcome.value
            assert words in outcome.value or rank > 0
