from __future__ import annotations

import pytest
import torch

from examples import local_updates as example
from examples.data import clusters
from examples.peers import tell_epochs
from swarmcli.dht import DHT
from swarmcli.events import RoundFinished
from swarmcli.optim import Optimizer
from tests.optim.shells import at_once, dhts

EPOCHS = 3


def train(model: torch.nn.Module, optimizer: Optimizer, seed: int) -> list[float]:
    """The example's loop, until the run is far enough."""
    losses = []
    for features, classes in clusters(example.BATCH, 1_000_000, seed):
        if optimizer.local_epoch >= EPOCHS:
            break
        loss = torch.nn.functional.cross_entropy(model(features), classes)
        loss.backward()
        before = next(model.parameters()).detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before, next(model.parameters()))
        losses.append(loss.item())
    return losses


def parameters_averaged(dht: DHT) -> list[RoundFinished]:
    seen: list[RoundFinished] = []

    def note(event: object) -> None:
        if isinstance(event, RoundFinished) and event.purpose.endswith("_grads"):
            seen.append(event)

    dht.events.subscribe(note)
    return seen


def optimizer_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and running statistics; how many batches batch norm has counted is each peer's own."""
    return [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]


def test_two_peers_step_by_themselves_and_average_what_they_have_become() -> None:
    with dhts(2) as pair:
        rounds = parameters_averaged(pair[0])
        torch.manual_seed(3)
        models = [example.normalized_classifier() for _ in pair]
        optimizers = [example.make_optimizer(dht, model) for dht, model in zip(pair, models, strict=True)]
        works = [lambda i=i: train(models[i], optimizers[i], seed=i) for i in range(2)]
        for losses in at_once(*works):
            assert losses[-1] < losses[0] / 2
        assert {optimizer.local_epoch for optimizer in optimizers} == {EPOCHS}
        for optimizer in optimizers:
            optimizer.shutdown()
    assert any(each.outcome == "committed" and len(each.contributors) == 2 for each in rounds), rounds
    one, other = (torch.cat([t.flatten() for t in optimizer_tensors(model)]) for model in models)
    assert torch.dist(one, other) < 0.2 * one.norm()


def test_the_example_says_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(example, "tell_epochs", lambda dht, say, every: tell_epochs(dht, say))  # and not each tenth
    example.train(example.normalized_classifier(), clusters(example.BATCH, 300, seed=1), [], say=said.append)
    assert any(line.startswith("epoch 2: 4096 samples of 1 peers") for line in said)
