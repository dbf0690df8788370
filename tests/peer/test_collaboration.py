from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from swarmcli.averaging import CenteredClip, Mean, Median, TrimmedMean
from swarmcli.compression import Float16Compression, NoCompression
from swarmcli.errors import CheckpointError
from swarmcli.optim import GradientAverager, Optimizer, Outer, PeerDescription, Sparse
from swarmcli.optim.modes import choose_mode
from swarmcli.peer.collaboration import (
    COMPRESSIONS,
    Collaboration,
    averager_options,
    device_in_words,
    grad_averager,
    mode_options,
    timing_options,
)
from swarmcli.recipe import Recipe
from swarmcli.recipe.settings import GradientCodec
from swarmcli.training import Compute
from swarmcli.training.resumed import Resume, resumed_place
from tests.checkpoints.small_checkpoints import fill
from tests.recipe.recipes import small

RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_compression_that_a_recipe_may_name_is_a_codec_of_its_own() -> None:
    assert COMPRESSIONS.keys() == set(get_args(GradientCodec))
    assert isinstance(COMPRESSIONS["none"], NoCompression)
    assert len({codec.name for codec in COMPRESSIONS.values()}) == len(COMPRESSIONS)
    for name, codec in COMPRESSIONS.items():
        assert codec.name.startswith(name)


def options(recipe: Recipe, *, computes: bool = True) -> dict[str, Any]:
    return {**mode_options(recipe), **timing_options(recipe, computes=computes)}


def test_a_recipe_without_modes_asks_for_the_optimizers_defaults() -> None:
    given = options(small())
    defaults = inspect.signature(Optimizer.__init__).parameters
    for name, value in given.items():
        default = defaults[name].default
        if isinstance(default, NoCompression):
            assert isinstance(value, NoCompression)
        else:
            assert value == default or (value is False and default is None), name


def test_every_mode_reaches_the_optimizer() -> None:
    local = options(small("local_updates.enabled=yes", "averaging.average_opt_statistics=[exp_avg]"))
    assert local["grad_averager"] is None and local["average_opt_statistics"] == ("exp_avg",)
    assert averager_options(small("averaging.target_group_size=8"))["target_group_size"] == 8
    assert averager_options(small())["target_group_size"] is None
    delayed = options(small("delay={grad_averaging: yes, state_averaging: no}"))
    assert delayed["delay_grad_averaging"] and delayed["delay_optimizer_step"] and delayed["offload_optimizer"]
    assert not delayed["delay_state_averaging"]
    outer = small("outer={optimizer: adam, lr: 0.2, momentum: 0.8, inner_batch_size: 8}")
    assert options(outer)["outer"] == Outer(8, "adam", 0.2, 0.8) and options(outer)["delay_grad_averaging"]
    assert not options(outer)["offload_optimizer"] and not options(outer, computes=False)["delay_grad_averaging"]
    squeezed = options(small("compression={gradients: float16, state_averaging: float16, state_download: float16}"))
    for name in ("grad_compression", "state_averaging_compression", "load_state_compression"):
        assert isinstance(squeezed[name], Float16Compression)
    assert options(small("averaging.average_state_every=4"))["average_state_every"] == 4
    offloading = small("delay.grad_averaging=yes", "local.offload_optimizer=yes")
    assert set(timing_options(offloading, computes=False).values()) == {False}, "who computes nothing waits"
    assert options(small("local.offload_optimizer=yes"))["offload_optimizer"]
    assert averager_options(small("averaging.part_size_bytes=4096", "local.bandwidth=0")) == {
        "part_size_bytes": 4096, "bandwidth": 0, "target_group_size": None, "proceed_alone": False, "audit": 0.005,
        "seats_per_network": 16, "max_share": 0.75, "trust": "strangers", "aggregator": CenteredClip(),
    }  # fmt: skip
    among_members = small("averaging.trust=members")
    for recipe in (among_members, small("gradient_averaging.method=powersgd")):
        assert averager_options(recipe)["aggregator"] == Mean()
    aggregators = {
        "{name: mean, gate: 50}": Mean(50.0),
        "{name: median}": Median(),
        "{name: trimmed_mean, trim: 0.2}": TrimmedMean(0.2),
        "{name: centered_clip, radius: 2, iterations: 1}": CenteredClip(2.0, 1),
    }
    for written, made in aggregators.items():
        assert averager_options(small(f"averaging.aggregator={written}"))["aggregator"] == made


def test_ways_to_average_have_the_recipes_options_and_plain_averaging_is_the_optimizers_default() -> None:
    assert grad_averager(small().gradient_averaging) is GradientAverager
    settings = "gradient_averaging={method: topk, k: 32, bits: 4, decay: 0.5}"
    made = choose_mode(grad_averager(small("averaging.trust=members", settings).gradient_averaging))
    assert isinstance(made, Sparse) and (made.k, made.bits, made.decay) == (32, 4, 0.5)
    for method in ("powersgd", "poweref"):
        recipe = small(f"gradient_averaging={{method: {method}, rank: 3, min_compression_ratio: 0.2}}")
        made = grad_averager(recipe.gradient_averaging)
        assert made.func.__name__.lower() == f"{method}gradientaverager"
        assert made.keywords == {"averager_rank": 3, "min_compression_ratio": 0.2}


def test_the_devices_of_a_site_are_counted() -> None:
    alone, first_of_four = Compute(torch.device("cuda", 1)), Compute(torch.device("cuda", 0), torch.bfloat16)
    assert device_in_words(small(), alone) == "cuda:1 (float32)"
    assert device_in_words(small("local.site.processes=4"), first_of_four) == "4 × cuda (bfloat16)"


def test_the_latest_checkpoint_is_looked_for_also_in_a_home_elsewhere(tmp_path: Path) -> None:
    recipe, home = small(f"output_dir={tmp_path / 'runs'}"), tmp_path / "home"
    with pytest.raises(CheckpointError, match=r"--resume latest: neither .*small nor .*home holds a checkpoint"):
        resumed_place(recipe, Resume("latest"), home)
    older = fill(tmp_path / "runs" / "small" / "trainer-1" / "checkpoints" / "epoch-000003", 3, "small")
    assert resumed_place(recipe, Resume("latest"), home) == older
    newer = fill(home / "checkpoints" / "epoch-000004", 4, "small")
    fill(home / "checkpoints" / "epoch-000009", 9, "another run")
    assert resumed_place(recipe, Resume("latest"), home) == newer
    assert resumed_place(recipe, Resume(str(older)), home) == older
    with pytest.raises(CheckpointError, match="does not exist"):
        resumed_place(recipe, Resume(str(tmp_path / "nowhere")), home)


def test_the_buffers_that_a_model_saves_reach_the_optimizer() -> None:
    made = Collaboration.__new__(Collaboration)
    made.peer = SimpleNamespace(dht=None, description=PeerDescription(), fingerprint={}, role="trainer")  # type: ignore
    made.compute = Compute(torch.device("cpu"))
    made.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    made.model.register_buffer("mask", torch.ones(5), persistent=False)
    handed_in = made._options(small(), auxiliary=False)["extra_tensors"]
    assert all(one is other for one, other in zip(handed_in, made.model[1].buffers(), strict=True))
