"""Which arguments of the Optimizer go together, what is chosen where they do, and what is said where they do not."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from swarmcli import Optimizer
from swarmcli.averaging.aggregators import Median
from swarmcli.compression import Float16Compression
from swarmcli.dht import DHT
from swarmcli.optim import GradientAverager, PowerEFGradientAverager, PowerSGDGradientAverager
from swarmcli.optim.arguments import averager_config, choose_timing
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.modes import choose_mode
from swarmcli.optim.modes.base import StateOptions, Timing
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.low_rank import PowerEF, PowerSGD
from swarmcli.optim.modes.outer import LocalUpdates, Outer, OuterSteps, SparseOuterSteps
from swarmcli.optim.modes.sparse import Sparse
from tests.optim.shells import dhts


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


def factory(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def schedule(kind: Any, *arguments: Any) -> dict[str, Any]:
    """A ready-made optimizer with its schedule."""
    made = factory(parameters())
    return READY | {"optimizer": made, "scheduler": kind(made, *arguments)}


L = torch.optim.lr_scheduler
READY: dict[str, Any] = {"optimizer": factory(parameters()), "params": None}
LOCAL = {"grad_averager": None}
OUTER = {"outer": Outer(4)} | READY
LOSSY = {"state_averaging_compression": Float16Compression()}
GROUPS = {"averager_opts": {"target_group_size": 8}}
RANK = PowerSGDGradientAverager.get_factory
THIN = PowerSGD(averager_rank=4, min_compression_ratio=0.1)


@pytest.fixture(scope="module")
def dht() -> Iterator[DHT]:
    with dhts(1) as (made,):
        yield made


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        # values by themselves
        ({"run_id": 5}, TypeError, "run_id"),
        ({"run_id": ""}, ValueError, "run_id"),
        ({"target_batch_size": "16"}, TypeError, "target_batch_size"),
        ({"target_batch_size": float("nan")}, TypeError, "target_batch_size"),
        ({"target_batch_size": True}, TypeError, "target_batch_size"),
        ({"target_batch_size": 0}, ValueError, "target_batch_size"),
        ({"matchmaking_time": None}, TypeError, "matchmaking_time"),
        ({"matchmaking_time": -1.0}, ValueError, "matchmaking_time"),
        ({"averaging_timeout": "1"}, TypeError, "averaging_timeout"),
        ({"load_state_timeout": 0}, ValueError, "load_state_timeout"),
        ({"allreduce_timeout": 0}, ValueError, "allreduce_timeout"),
        ({"average_state_every": 1.5}, ValueError, "average_state_every"),
        ({"average_state_every": True}, ValueError, "average_state_every"),
        ({"reuse_grad_buffers": "no"}, TypeError, "reuse_grad_buffers='no': expected True or False"),
        ({"load_state_compression": 3}, TypeError, "load_state_compression=3"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm.*positive"),
        ({"tracker_opts": {"min_refresh_period": 0}}, ValueError, "min_refresh_period"),
        ({"averager_opts": {"state_tolerance": 0}}, ValueError, "state_tolerance=0"),
        ({"averager_opts": {"proceed_alone": "no"}}, TypeError, "proceed_alone"),
        ({"averager_opts": {"banwidth": 1.0}}, TypeError, "no 'banwidth'; there are aggregator, audit, bandwidth"),
        # optimizers, schedules and their parameters
        ({"optimizer": 7}, TypeError, "optimizer"),
        ({"optimizer": lambda params: 7}, TypeError, "returned int"),
        ({"optimizer": lambda params: 7, "offload_optimizer": False}, TypeError, "the factory returned int"),
        ({"params": None}, ValueError, "params"),
        (READY | {"params": parameters()}, ValueError, "params: only for an optimizer factory"),
        ({"optimizer": torch.optim.LBFGS}, ValueError, "LBFGS needs a closure"),
        ({"optimizer": torch.optim.LBFGS, "offload_optimizer": False}, ValueError, "LBFGS needs a closure"),
        ({"scheduler": 7}, TypeError, "scheduler"),
        (schedule(L.StepLR, 2) | {"optimizer": factory, "params": parameters()}, ValueError, "give a factory"),
        (schedule(L.StepLR, 2) | READY, ValueError, "another optimizer"),
        (schedule(L.ReduceLROnPlateau), ValueError, "ReduceLROnPlateau wants 'metrics'"),
        # delays
        ({"delay_grad_averaging": True, "delay_optimizer_step": False}, ValueError, "cannot come before its gradients"),
        ({"delay_optimizer_step": True, "offload_optimizer": False}, ValueError, "delay_optimizer_step=True needs"),
        (READY | {"offload_optimizer": True}, ValueError, "offload_optimizer=True needs an optimizer factory"),
        (READY | {"delay_grad_averaging": True}, ValueError, "a ready-made optimizer steps the model's parameters"),
        # what a way to train has no use for
        (LOCAL | {"reuse_grad_buffers": True}, ValueError, "reuse_grad_buffers=True has no use in local updates"),
        (LOCAL | {"use_ext_grad_buffer": True}, ValueError, "use_ext_grad_buffer=True has no use in local updates"),
        (LOCAL | {"delay_grad_averaging": True}, ValueError, "delay_grad_averaging=True has no use in local updates"),
        (LOCAL | {"max_grad_norm": 1}, ValueError, "max_grad_norm.*local"),
        (OUTER | {"reuse_grad_buffers": True}, ValueError, "has no use with outer steps"),
        (OUTER | {"optimizer": factory, "params": parameters(), "offload_optimizer": True}, ValueError, "inner steps"),
        (OUTER | GROUPS, ValueError, "target_group_size has no use with outer steps"),
        (OUTER | LOCAL, ValueError, "differences are averaged by GradientAverager or Sparse, not by"),
        (GROUPS | LOSSY, ValueError, "state_averaging_compression='float16': with target_group_size"),
        (GROUPS | {"grad_averager": RANK(averager_rank=1)}, ValueError, "target_group_size: PowerSGD and PowerEF need"),
        ({"auxiliary": True, "batch_size_per_step": 4}, ValueError, "batch_size_per_step"),
        # ways to average gradients
        ({"grad_averager": PowerSGDGradientAverager}, TypeError, "averager_rank"),
        ({"grad_averager": RANK(averager_rank=0)}, ValueError, "averager_rank"),
        ({"grad_averager": RANK(averager_rank=True)}, TypeError, "averager_rank"),
        ({"grad_averager": RANK(averager_rank=4, min_compression_ratio=1.0)}, ValueError, "min_compression_ratio"),
        ({"grad_averager": RANK(averager_rank=4, part_size_bytes=9)}, TypeError, "'part_size_bytes'.*averager_opts"),
        ({"grad_averager": GradientAverager.get_factory(averager_rank=4)}, TypeError, "takes no 'averager_rank'"),
        ({"grad_averager": dict}, TypeError, "expected GradientAverager"),
        ({"grad_averager": partial(Sparse, k=31)}, ValueError, "k must be"),
        ({"grad_averager": partial(Sparse, bits=3)}, ValueError, "bits must be"),
        ({"grad_averager": partial(Sparse, decay=1.1)}, ValueError, "decay="),
        ({"grad_averager": Sparse, "grad_compression": Float16Compression()}, ValueError, "grad_compression"),
        ({"grad_averager": Sparse, "averager_opts": {"aggregator": Median()}}, ValueError, "aggregator"),
        (OUTER | {"grad_averager": Sparse, "outer": Outer(4, "adam")}, ValueError, r"outer\.momentum=.*use Outer"),
        (
            OUTER | {"grad_averager": Sparse, "outer": Outer(4, momentum=0.9)},
            ValueError,
            r"outer\.momentum=.*use Outer",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    dht: DHT, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    usual = {"run_id": "run", "target_batch_size": 8, "optimizer": factory, "params": parameters()}
    with pytest.raises(error, match=words):
        Optimizer(dht=dht, **usual | options)


@pytest.mark.parametrize("wrong", [{"optimizer": "lion"}, {"lr": 0.0}, {"momentum": 1.0}, {"inner_batch_size": 0}])
def test_outer_steps_that_cannot_be_meant_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"outer.{min(wrong)}"):
        Outer(**{"inner_batch_size": 4, **wrong})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (Timing.AT_ONCE, True)),
        ({"offload": False}, (Timing.AT_ONCE, False)),
        ({"delayed_step": True}, (Timing.DELAYED_STEP, True)),
        ({"delayed_averaging": True}, (Timing.DELAYED_AVERAGING, True)),
        (READY, (Timing.AT_ONCE, False)),
    ],
)
def test_a_factory_means_offloading_and_delayed_gradients_a_delayed_step(given: Any, expected: object) -> None:
    usual = {"offload": None, "delayed_step": None, "delayed_averaging": False}
    assert choose_timing(**{"optimizer": factory, "params": parameters()} | usual | given) == expected


@pytest.mark.parametrize(
    ("grad_averager", "outer", "mode"),
    [
        (None, None, LocalUpdates()),
        (GradientAverager, None, Mode()),
        (GradientAverager.get_factory(), None, Mode()),
        (RANK(averager_rank=4), None, PowerSGD(averager_rank=4, min_compression_ratio=0.5)),
        (partial(RANK(averager_rank=4), min_compression_ratio=0.1), None, THIN),
        (partial(PowerEFGradientAverager, averager_rank=8), None, PowerEF(averager_rank=8)),
        (GradientAverager, Outer(4), OuterSteps(outer=Outer(4))),
        (partial(Sparse, k=32, bits=4), Outer(4), SparseOuterSteps(outer=Outer(4), k=32, bits=4)),
    ],
)
def test_what_an_averager_class_stands_for(grad_averager: Any, outer: Outer | None, mode: Mode) -> None:
    made = choose_mode(grad_averager, outer)
    assert type(made) is type(mode) and made == mode


@pytest.mark.parametrize(
    ("kind", "several", "every", "expected"),
    [(LocalUpdates, False, None, None), (LocalUpdates, True, 5, 5), (Mode, True, None, 1), (Mode, False, 3, 3)],
)
def test_how_often_states_are_averaged(
    kind: type[Mode], several: bool, every: int | None, expected: int | None
) -> None:
    assert kind(state=StateOptions(average_every=every), target_group_size=8).average_state_every(several) == expected


def test_averager_opts_and_timeouts_reach_their_component() -> None:
    config = OptimizerConfig("run", 8, averaging_timeout=40.0)
    made = averager_config(config, options={"target_group_size": 4, "bandwidth": 0.5, "sender_timeout": 3.0})
    assert (made.matchmaking.target_group_size, made.bandwidth, made.allreduce.sender_timeout) == (4, 0.5, 3.0)
    assert made.allreduce.allreduce_timeout == 40.0
    made = averager_config(config, allreduce_timeout=7.0, next_chunk_timeout=2.0)
    assert (made.allreduce.allreduce_timeout, made.allreduce.sender_timeout) == (7.0, 2.0)
