"""Checkpoints beside a run: which epochs are written, of which moment, and what a failure does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from swarmcli.errors import CheckpointError, DataError, SiteError
from swarmcli.events import Evaluated, Events, Noticed
from swarmcli.network.identity import Identity, PeerID
from swarmcli.peer.checkpoints import ALONE, BackgroundCheckpoints, Evaluation
from swarmcli.threads import count_threads_by
from swarmcli.training import Compute
from swarmcli.training.device import on_host

ADA = Identity.from_seed(1).peer_id


class FakeOptimizer:
    def __init__(self) -> None:
        self.local_epoch = 0
        self.is_averaging = False
        self.statistics = torch.zeros(1)
        self.offered: list[bool] = []
        self.told: list[tuple[int, float, int]] = []  # evaluations
        self.elsewhere = False  # somebody else writes
        self.heir: tuple[PeerID, int] | None = None
        self.asked = 0

    def report(self) -> Any:
        return SimpleNamespace(epoch=self.local_epoch, lineage=f"lineage {self.local_epoch}")

    def peers(self) -> dict[PeerID, Any]:
        return {ADA: SimpleNamespace(name="Ada")}

    core = metrics = directory = succession = property(lambda self: self)

    def call(self, action: Callable[[Any], Any]) -> Any:
        return action(self)

    def announce(self) -> None: ...

    def note_evaluation(self, epoch: int, loss: float, samples: int, metrics: Mapping[str, float]) -> None:
        self.told.append((epoch, loss, samples))

    def offer(self, offered: bool) -> None:
        self.offered.append(offered)

    def is_elsewhere(self) -> bool:
        self.asked += 1
        return self.elsewhere

    def leave(self, *, relies: bool) -> tuple[PeerID, int] | None:
        return self.heir

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"sum": self.statistics}}, "param_groups": []}


class FakeStore:
    """Writes as slowly as its test wants."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.written: list[tuple[int, float, Any]] = []
        self.error: Exception | None = None
        self.full = False
        self.directory = Path("home/checkpoints")
        self.losses: dict[str, float] = {}
        self.checkpoints = self  # the checkpoints that it holds
        self.average: float | None = None

    def all(self) -> list[Path]:
        return [Path(f"epoch-{epoch:06d}") for epoch, _, _ in self.written]

    def linked(self, link: str) -> str:
        return min(self.losses, key=self.losses.__getitem__, default="")

    def remember_loss(self, place: Path, loss: float, samples: int, metrics: Mapping[str, float]) -> bool:
        self.losses[place.name] = loss
        return self.linked("best") == place.name

    def write(self, model: nn.Module, state: Mapping[str, Any], epoch: int) -> Path | None:
        self.free.wait()
        if self.error is not None:
            raise self.error
        if self.full:
            return None
        self.written.append((epoch, next(model.parameters()).item(), state["state"]))
        return Path(f"epoch-{epoch:06d}")

    def put_averages(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        if self.average is not None:
            nn.init.constant_(next(model.parameters()), self.average)


class FakeEvaluation:
    def __init__(self, every: int) -> None:
        self.every = every
        self.epochs: list[int] = []
        self.leaves = False
        self.threads: list[int] = []
        self.losses: list[float] = []
        self.appointed = True

    def is_due(self, epoch: int) -> bool:
        return self.appointed and epoch % self.every == 0

    def __call__(self, model: nn.Module, epoch: int) -> Evaluated | None:
        self.epochs.append(epoch)
        self.threads.append(torch.get_num_threads())
        self.losses.append(round(next(model.parameters()).item() / 10, 5))
        return None if self.leaves else Evaluated(epoch, self.losses[-1], 4)


class Run:
    def __init__(self, every: int = 1, **options: Any) -> None:
        self.store, self.optimizer, self.model = FakeStore(), FakeOptimizer(), nn.Linear(1, 1, bias=False)
        store, optimizer = cast(Any, self.store), cast(Any, self.optimizer)
        self.checkpoints = BackgroundCheckpoints(store, self.model, optimizer, every, **options)

    def come_to(self, epoch: int) -> None:
        self.optimizer.local_epoch = epoch
        nn.init.constant_(self.model.weight, epoch)
        self.checkpoints.look()

    def pass_through(self, *epochs: int) -> None:
        """With time for the disk and for the answers of others in each."""
        for epoch in epochs:
            self.come_to(epoch)
            self.idle()

    def idle(self) -> None:
        """Lets the disk and the answers of others keep up."""
        self.checkpoints._writer.submit(lambda: None).result()

    @property
    def epochs(self) -> list[int]:
        return [epoch for epoch, _, _ in self.store.written]


def test_multiples_are_written_and_the_end() -> None:
    run = Run(every=3)
    with run.checkpoints:
        run.pass_through(*range(1, 8))
    assert run.epochs == [3, 6, 7] and run.checkpoints.outcome == "saved epoch 7 at epoch-000007"
    for error, written in ((DataError("the server is gone"), [4]), (KeyError(), [])):
        run = Run(every=0, yields=True)
        with pytest.raises(type(error)), run.checkpoints:
            run.come_to(4)
            raise error
        assert run.epochs == written, "data that cannot be read on cost no state; after another error nothing is known"


def test_a_computer_without_a_further_thread_costs_no_more_than_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    events, told = Events(), list[Any]()
    events.subscribe(told.append)
    run, state = Run(events=events), FakeOptimizer.state_dict
    with run.checkpoints:
        monkeypatch.setattr(threading.Thread, "start", fail)
        monkeypatch.setattr(FakeOptimizer, "state_dict", fail)  # which has others copy
        run.come_to(1)
        monkeypatch.setattr(FakeOptimizer, "state_dict", state)
        run.pass_through(2)
    text = "no checkpoint of epoch 1 is written or evaluated: can't start new thread"
    assert run.epochs == [2] and told[0] == Noticed("warning", text)


def fail(self: object) -> dict[str, Any]:
    raise RuntimeError("can't start new thread")


def test_a_slow_disk_costs_checkpoints_and_each_is_of_one_moment() -> None:
    run = Run()
    with run.checkpoints:
        run.store.free.clear()
        for epoch in (1, 2, 3):
            run.come_to(epoch)
        run.optimizer.statistics.fill_(9.0)
        run.store.free.set()
    assert run.epochs == [1, 3]
    assert [weight for _, weight, _ in run.store.written] == [1.0, 3.0]
    assert float(run.store.written[0][2][0]["sum"]) == 0.0
    site = Run(copy=lambda state: state)
    with site.checkpoints:
        site.come_to(1)
    assert site.store.written[0][2][0]["sum"] is site.optimizer.statistics, "a site's state is a copy already"


def test_what_is_on_a_device_is_copied_to_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device plays a full one: nothing can be copied on it without being seen here."""
    run = Run()
    run.model.to("meta")
    run.optimizer.statistics = torch.zeros(1, device="meta")
    seen: list[torch.device] = []

    def write(model: nn.Module, state: Any, epoch: int) -> Path:
        seen.extend(tensor.device for tensor in (*model.parameters(), state["state"][0]["sum"]))
        return Path("epoch-000001")

    def to(tensor: torch.Tensor, device: str, *, copy: bool) -> torch.Tensor:
        assert copy
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

    monkeypatch.setattr(run.store, "write", write)
    monkeypatch.setattr(torch.Tensor, "to", to)
    with run.checkpoints:
        run.optimizer.local_epoch = 1
        run.checkpoints.look()
    assert seen == [torch.device("cpu")] * 2


def test_a_copy_is_the_same_model_and_shares_nothing_with_it() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight  # tied
    model[0].weight.requires_grad_(False)
    copied = on_host(model)
    assert copied[1].weight is copied[0].weight and not copied[0].weight.requires_grad
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    before = {name: tensor.clone() for name, tensor in copied.state_dict().items()}
    for tensor in model.state_dict().values():
        tensor.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in copied.state_dict().items())


def test_a_site_that_broke_while_it_wrote_is_heard_of_at_the_next_checkpoint() -> None:
    run = Run()
    run.store.error = SiteError("rank 1 is gone")
    with pytest.raises(SiteError, match="rank 1 is gone"), run.checkpoints:
        run.pass_through(1, 2)
    assert run.epochs == []


def test_who_leaves_writes_nothing_if_another_stays_with_as_much_but_a_monitor_does_and_the_last_one_says_so() -> None:
    events, told = Events(), []
    events.subscribe(told.append)
    run = Run(every=0, yields=True, events=events)
    run.optimizer.heir = ADA, 6
    with run.checkpoints:
        run.come_to(5)
    assert run.epochs == []
    assert run.checkpoints.outcome == "the model is safe: peer Ada has it (epoch 6)" and not told
    run.checkpoints.require()
    monitor = Run(every=0, offers=True)
    monitor.optimizer.heir = ADA, 6
    with monitor.checkpoints:
        monitor.come_to(5)
    assert (monitor.epochs, monitor.optimizer.offered) == ([5], []), "every_epochs is 0: nobody may rely on it"
    last, told[:] = Run(every=0, events=events), []
    with last.checkpoints:
        last.come_to(5)
    assert told[-1] == Noticed("info", ALONE)
    over, told[:] = Run(every=0, events=events, is_over=lambda: True), []
    with over.checkpoints:
        over.come_to(5)
    assert over.epochs == [5] and not told


def test_who_has_learned_nothing_leaves_nothing_and_what_it_went_on_from_is_saved_already() -> None:
    for place, outcome in ((None, ""), (Path("epoch-000000"), "saved epoch 0 at epoch-000000")):
        run = Run(yields=True, path=place)
        with run.checkpoints:
            run.checkpoints.look()
        assert run.epochs == [] and run.checkpoints.outcome == outcome


def test_a_trainer_writes_only_where_nobody_else_does() -> None:
    run = Run(every=2, offers=True, yields=True)
    with run.checkpoints:
        run.optimizer.elsewhere = True
        run.come_to(2)
        run.idle()
        run.come_to(3)
        assert run.optimizer.asked == 1, "it asks when a checkpoint is due, not in every step"
        run.optimizer.elsewhere = False  # the other one has died
        run.come_to(4)
        run.idle()
        run.checkpoints.look()
        run.idle()
    assert run.epochs == [4]
    assert run.optimizer.offered == [True, True]
    fails = Run(every=1, offers=True)
    with fails.checkpoints:
        fails.store.full = True
        fails.pass_through(1)
        fails.store.full = False
        fails.pass_through(2)
    assert fails.optimizer.offered == [True, False, True], "while it cannot write the next takes over"
    answered, asks = threading.Event(), Run(every=1, yields=True)
    asks.optimizer.is_elsewhere = lambda: not answered.wait()  # type: ignore[method-assign]
    with asks.checkpoints:
        for epoch in (1, 2):  # its steps do not wait for the answer
            asks.come_to(epoch)
        answered.set()
        asks.idle()
        asks.pass_through(3)
    assert asks.epochs == [3]


def test_a_last_state_that_was_not_written_is_tried_again_and_no_good_end() -> None:
    events, told = Events(), list[str]()
    events.subscribe(lambda event: told.append(cast(Noticed, event).text))
    run = Run(every=0, yields=True, events=events)
    run.store.full = True
    with run.checkpoints:
        run.come_to(5)
    assert run.checkpoints.outcome == "epoch 5 could not be saved in home/checkpoints"
    with pytest.raises(CheckpointError, match=r"is not in home/checkpoints.*as they were.*make room"):
        run.checkpoints.require()
    run.store.full = False
    run.checkpoints.require()
    assert run.epochs == [5] and run.checkpoints.outcome == "saved epoch 5 at epoch-000005"
    assert told == [ALONE], "once for all tries"


def test_evaluations_measure_the_average_and_checkpoints_hold_the_weights_themselves() -> None:
    evaluation = FakeEvaluation(every=3)
    run = Run(every=4, evaluation=evaluation)
    run.store.average = 7.0
    with run.checkpoints:
        run.pass_through(*range(1, 6))
    assert [(epoch, weight) for epoch, weight, _ in run.store.written] == [(4, 4.0), (5, 5.0)]
    assert evaluation.losses == [0.7, 0.7, 0.7] and evaluation.epochs == [3, 4, 5], (
        "beside each checkpoint, and between"
    )
    assert run.store.losses == {"epoch-000004": 0.7, "epoch-000005": 0.7}
    assert run.model.weight.item() == 5.0, "training goes on with the weights themselves"
    evaluation.leaves, run = True, Run(every=1, evaluation=evaluation)
    with run.checkpoints:
        run.come_to(1)
    assert run.epochs == [1] and run.store.losses == {}, "an evaluation without a result leaves the checkpoint as it is"


def test_a_trainer_evaluates_only_where_it_writes_or_is_appointed() -> None:
    evaluation = FakeEvaluation(every=3)
    evaluation.appointed = False
    run = Run(every=2, offers=True, yields=True, evaluation=evaluation)
    with run.checkpoints:
        run.optimizer.elsewhere = True
        run.pass_through(1, 2)
        assert run.optimizer.asked == 1 and not evaluation.epochs
        evaluation.appointed = True
        run.pass_through(3)
        assert (evaluation.epochs, run.epochs) == ([3], []), "no checkpoint is due at epoch 3"
        run.optimizer.elsewhere = False  # the other one has died
        run.pass_through(4, 5)
        assert (evaluation.epochs, run.epochs) == ([3, 5], [5])
        run.pass_through(6, 7)
        assert evaluation.epochs == [3, 5, 6, 7] and run.epochs == [5, 7], "it measures first, and finds out meanwhile"
        evaluation.every = 1
        run.pass_through(8, 8)
        assert evaluation.epochs[4:] == [8] and run.epochs[2:] == [8], "what it has measured it need not measure again"


@pytest.mark.parametrize(("trains", "threads"), [(True, 1), (False, 3)])
def test_beside_a_trainer_one_thread_evaluates_and_a_monitor_takes_its_share(trains: bool, threads: int) -> None:
    evaluation = FakeEvaluation(every=1)
    run = Run(every=1, yields=trains, evaluation=evaluation)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with count_threads_by(lambda: 3):
            run.pass_through(1, 2, 3, 4)  # a trainer first asks whether somebody else writes
        assert evaluation.threads and set(evaluation.threads) == {threads}
        assert torch.get_num_threads() == 2, "the thread that trains keeps its own"
    finally:
        run.checkpoints._writer.shutdown()
        torch.set_num_threads(before)


class FakeTask:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.read = 0

    def evaluation_batches(self) -> list[dict[str, torch.Tensor]]:
        self.read += 1
        if self.error is not None:
            raise self.error
        return [{"x": torch.full((2, 1), 3.0)}, {"x": torch.full((1, 1), 6.0)}]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch["x"]).mean()
        return loss


def test_an_evaluation_that_fails_is_told_once_and_tried_again() -> None:
    events, told = Events(), []
    events.subscribe(told.append)
    task, recipe = FakeTask(), SimpleNamespace(evaluation=SimpleNamespace(every_epochs=2))
    peer, optimizer = SimpleNamespace(recipe=recipe, events=events), FakeOptimizer()
    evaluations = SimpleNamespace(note=told.append, is_appointed=lambda: True)
    collaboration = SimpleNamespace(
        peer=peer, task=task, compute=Compute(torch.device("cpu")), optimizer=optimizer, evaluations=evaluations
    )
    evaluation = Evaluation(cast(Any, collaboration), lambda: False)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    task.error = DataError("the texts are gone")
    assert evaluation(model, 1) is None and evaluation(model, 2) is None
    assert told == [Noticed("warning", "epoch 1 was not evaluated: the texts are gone")]
    task.error = None
    assert evaluation(model, 3) == evaluation(model, 3) == told[-1] == Evaluated(3, 4.0, 3)
    assert task.read == 3, "what was read once is kept"
    assert optimizer.told[-1] == (3, 4.0, 3), "the others hear of it"
    assert evaluation.is_due(4) and not evaluation.is_due(3)
    evaluations.is_appointed = lambda: False
    assert not evaluation.is_due(4)
