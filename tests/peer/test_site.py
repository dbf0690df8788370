"""The trainer as a site, in real processes: every mode ends with one model at all ranks, and goes on from its state."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from swarmcli.errors import RecipeError
from swarmcli.events import EpochAdvanced
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from swarmcli.peer.site import Introduction, form_site, run_site_leader, run_site_member, stream_seed_of
from swarmcli.recipe import Recipe
from swarmcli.run.watch import RunWatch
from swarmcli.training import load_checkpoint, stream_seed
from swarmcli.training.resumed import Resume
from tests.peer.roles import Sums, SumsStream
from tests.recipe.recipes import small
from tests.sharding.processes import Worlds

pytestmark = pytest.mark.e2e

LOCAL = "local_updates.enabled=yes"
ZERO = "local.site.zero=yes"


class SiteSums(Sums):
    """The sum of eight numbers, with what a process of a site made and read."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.seeds: list[int] = []
        self.began = 0  # the batches that the stream had given before

    def build_model(self, *, outline: bool = False) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        if not outline:  # an outline is not trained
            self.models.append(model)
        return model

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> SumsStream:
        self.seeds.append(seed)
        self.began = position["drawn"] if position else 0
        return SumsStream(seed, self.began)


def recipe_for(directory: str, settings: list[str]) -> Recipe:
    own = ["target_batch_size=64", "optimizer.learning_rate=1e-2", "optimizer.max_grad_norm=1", "local.device=cpu"]
    own += ["local.host=127.0.0.1", "local.site.timeout=20", f"output_dir={directory}"]
    return small(*own, *settings)


def train(directory: str, settings: list[str], how: dict[str, Any]) -> list[Any]:
    """One process of a site: its weights at the end, the seed of its data, and at rank 0 the epochs that it ended and
    its loss."""
    task, home = SiteSums(), Path(directory, "home")
    recipe = recipe_for(directory, settings)
    epochs: list[int] = []
    if "resume" in how:
        how["resume"] = Resume(*how["resume"])
    result: list[Any] = []
    with (
        patch("swarmcli.peer.site.build_task", lambda recipe: task),
        patch("swarmcli.peer.collaboration.build_task", lambda recipe: task),
        form_site(recipe, 0) as (site, compute),
    ):
        if site.rank:
            run_site_member(recipe, site, compute, threading.Event(), home=home)
        else:
            with Home.at(home) as claimed, join_run(recipe, "trainer", claimed) as peer:
                watch = RunWatch(peer)
                peer.events.subscribe(
                    lambda event: epochs.append(event.epoch) if isinstance(event, EpochAdvanced) else None
                )
                done = run_site_leader(peer, watch, threading.Event(), site, compute, **how)
                device = watch.look().peers[0].device
                watch.close()
            result = [epochs, done.loss, peer.summary.samples, device]
    if site.rank == 0:  # the next life may train for longer
        Path(home, "hello.json").unlink()
    return [list(task.models[0].state_dict().values()), (task.seeds[0], task.began), *result]


def run(worlds: Worlds, directory: Path, *settings: str, size: int = 4, **how: Any) -> list[Any]:
    words = [*settings, f"local.site.processes={size}"]
    return worlds(size, grouped=False).run(train, str(directory), words, how)


def assert_equal_models(ranks: list[Any]) -> None:
    for other in ranks[1:]:
        assert all(torch.equal(own, theirs) for own, theirs in zip(ranks[0][0], other[0], strict=True))


def error_of(tensors: list[torch.Tensor]) -> float:
    """The loss of a model with these tensors over many samples; an epoch of the tests has too few to compare."""
    task = SiteSums()
    model = task.build_model()
    model.load_state_dict(dict(zip(model.state_dict(), tensors, strict=True)))
    features = torch.randn(4096, 8, generator=torch.Generator().manual_seed(3))
    return task.loss(model, {"features": features}).item()


MODES: dict[str, tuple[int, list[str]]] = {
    "gradients": (2, []),
    "gradients, zero": (4, [ZERO]),
    "local updates": (2, [LOCAL]),
    "local updates, zero": (2, [LOCAL, ZERO]),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_site_trains_and_goes_on_from_its_last_state(worlds: Worlds, tmp_path: Path, mode: str) -> None:
    size, settings = MODES[mode]
    first = run(worlds, tmp_path, *settings, "max_epochs=3", size=size)
    assert_equal_models(first)
    assert len({seed for _, (seed, _), *_ in first}) == size
    assert [began for _, (_, began), *_ in first] == [0] * size
    _, _, epochs, _, samples, device = first[0]
    assert epochs == [1, 2, 3] and samples >= 3 * 64 and device == f"{size} × cpu (float32)"
    last = load_checkpoint(tmp_path / "home" / "checkpoints" / "epoch-000003", "small")
    assert sorted(last.optimizer["state"]) == list(range(len(list(SiteSums().build_model().parameters()))))

    again = run(worlds, tmp_path, *settings, "max_epochs=6", size=size, restarted="zero" in mode)
    assert_equal_models(again)
    assert again[0][2] == [4, 5, 6]
    for (_, (seed, before), *_), (_, (same, later), *_) in zip(first, again, strict=True):
        assert seed == same and later > before  # each rank goes on in a stream of its own
    assert error_of(again[0][0]) < error_of(first[0][0])
    place = str(tmp_path / "home" / "checkpoints")
    resumed = run(worlds, tmp_path, *settings, "max_epochs=7", size=size, resume=[place, None])
    assert resumed[0][2] == [7]

    other = [*settings, "run_id=other", "optimizer.learning_rate=5e-3", "max_epochs=8"]
    resumed = run(worlds, tmp_path / "other", *other, size=size, resume=[place, "small"])
    assert_equal_models(resumed)
    assert resumed[0][2] == [8]
    kept = load_checkpoint(tmp_path / "other" / "home" / "checkpoints" / "epoch-000008", "other").optimizer
    assert {group["lr"] for group in kept["param_groups"]} == {5e-3}


def test_no_two_ranks_of_no_two_peers_read_the_same_stream() -> None:
    recipe = small()
    peers = [Introduction(bytes([number]) * 32, "trainer-1") for number in (1, 2)]
    seeds = {stream_seed_of(recipe, peer, rank) for peer in peers for rank in range(1, 5)}
    seeds |= {stream_seed(recipe.seed, peer.peer_id) for peer in peers}
    assert len(seeds) == 10


@pytest.mark.parametrize(("count", "found"), [(0, "torch finds none at all"), (1, "there are 1")])
def test_a_process_without_a_device_of_its_own_is_refused(tmp_path: Path, count: int, found: str) -> None:
    """What it names is what the volunteer has typed: the number of processes is an override by --nproc, too."""
    recipe = recipe_for(str(tmp_path), ["local.site.processes=2", "local.device=cuda"])
    with (
        patch("torch.cuda.is_available", lambda: count > 0),
        patch("torch.cuda.device_count", lambda: count),
        pytest.raises(RecipeError) as refused,
        form_site(recipe, 1),
    ):
        raise AssertionError("there is none")
    assert str(refused.value) == (
        "--set local.device=cuda: local.device is cuda, but process 1 of the site finds no CUDA device of its own on "
        f"this machine: {found}; start as many processes as there are devices (--nproc), or set local.device to cpu"
    )
