from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.dht import DHT
from swarmcli.errors import OptimizerError
from swarmcli.events import EpochAdvanced
from tests.optim.shells import at_once, dhts

EPOCHS = 4


@pytest.fixture(autouse=True)
def short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    global example  # only now: transformers takes seconds to import, and every process of a run collects this file
    from examples import transformers_trainer as example

    monkeypatch.setattr(example, "TARGET", 64)


def swarm_trainer(dht: DHT, place: Path, epochs: int = EPOCHS, model: Any = None, **settings: Any) -> Any:
    """A Trainer on the example's model and data, with everything that the example sets."""
    model = example.small_model() if model is None else model
    optimizer = example.make_optimizer(dht, model, 10)
    trainer = example.make_trainer(model, example.counting(72, 1), optimizer, 1, str(place), epochs)
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    return trainer, optimizer


@pytest.fixture
def made_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers of one process, each made whole before either trains.

    TrainingArguments empties the state that accelerate keeps for the process; a trainer at work would find it empty.
    """
    one_at_a_time, both = threading.Lock(), threading.Barrier(2, timeout=60)
    make_trainer = example.make_trainer

    def make(*args: Any) -> Any:
        with one_at_a_time:
            trainer = make_trainer(*args)
        both.wait()
        return trainer

    monkeypatch.setattr(example, "make_trainer", make)


@pytest.mark.usefixtures("made_in_turn")
def test_two_trainers_end_with_the_same_parameters() -> None:
    with dhts(1) as (first,):
        contacts = list(first.get_visible_addresses())
        said: list[str] = []
        digests = at_once(*(lambda seed=seed: example.train(contacts, seed, 3, say=said.append) for seed in (1, 2)))
    assert digests[0] == digests[1]
    assert any("of 2 peers" in line for line in said)


def test_it_equals_a_loop_over_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient accumulation (with a shorter step where the data ends), clipping and the schedule of the example."""
    torch.manual_seed(7)
    model, again = example.small_model().double(), example.small_model().double()
    again.load_state_dict(model.state_dict())
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    epochs: list[int] = []
    monkeypatch.setattr(example, "ACCUMULATE", 4)
    with dhts(1) as (dht,):
        dht.events.subscribe(lambda event: epochs.append(event.samples) if isinstance(event, EpochAdvanced) else None)
        # A pass over 72 samples are 18 batches: of four to a step the last one has but two, so epochs are uneven.
        trainer, optimizer = swarm_trainer(dht, tmp_path, model=model)
        trainer.train()
        assert optimizer.local_epoch == EPOCHS
        optimizer.shutdown()

    assert len(epochs) == EPOCHS and set(epochs) == {64, 72}
    inner = torch.optim.AdamW(again.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.1, total_iters=10)
    for batch in torch.cat(seen).split(epochs):
        inner.zero_grad()
        again(input_ids=batch, labels=batch, num_items_in_batch=batch.numel()).loss.backward()  # as Trainer does
        torch.nn.utils.clip_grad_norm_(again.parameters(), 1.0)
        inner.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(inner.param_groups[0]["lr"])
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_it_goes_on_from_a_checkpoint_of_trainers(tmp_path: Path) -> None:
    with dhts(1) as (dht,):
        trainer, optimizer = swarm_trainer(dht, tmp_path, save_strategy="steps", save_steps=16, max_steps=16)
        trainer.train()
        epoch, digest = optimizer.local_epoch, optimizer.state_digest()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.shutdown()
    with dhts(1) as (dht,):
        trainer, optimizer = swarm_trainer(dht, tmp_path, max_steps=16)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-16"))
        assert (optimizer.local_epoch, optimizer.state_digest()) == (epoch, digest)
        assert optimizer.param_groups[0]["lr"] == rate
        assert epoch == 2
        optimizer.shutdown()


def test_what_trainer_would_make_wrong_in_silence_is_refused(tmp_path: Path) -> None:
    with dhts(1) as (dht,):
        trainer, optimizer = swarm_trainer(dht, tmp_path, max_grad_norm=1.0)
        with pytest.raises(OptimizerError, match="max_grad_norm=0"):
            trainer.train()
        trainer.args.max_grad_norm, trainer.lr_scheduler = 0.0, None  # so it makes a scheduler of its own
        with pytest.raises(OptimizerError, match="learning rate was changed"):
            trainer.train()
        model = trainer.model.requires_grad_(False)  # as trl does for `peft_config`, before it calls Trainer
        with pytest.raises(OptimizerError, match="peft_config"):
            example.make_trainer(model, trainer.train_dataset, optimizer, 1, str(tmp_path))
        optimizer.shutdown()


def test_the_others_see_its_loss(tmp_path: Path) -> None:
    with dhts(1) as (dht,):
        trainer, optimizer = swarm_trainer(dht, tmp_path, epochs=2, logging_steps=1)
        trainer.train()
        assert 1.0 < optimizer.report().loss < 5.0
        optimizer.shutdown()
