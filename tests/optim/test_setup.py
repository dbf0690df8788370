"""Which arguments of the Optimizer go together, and what is said where they do not."""

from typing import Any

import pytest
import torch

from swarmcli.compression import Float16Compression
from swarmcli.optim import GradientAverager, PowerSGDGradientAverager
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.epoch.work import Timing
from swarmcli.optim.modes import StateOptions
from swarmcli.optim.setup import ModeOptions, averager_config, make_scheduler, place_optimizer, state_options
from swarmcli.optim.state.placement import InPlace, Offloaded

DEFAULTS: dict[str, Any] = {
    "grad_averager": GradientAverager,
    "reuse_grad_buffers": False,
    "offload_optimizer": None,
    "delay_optimizer_step": None,
    "delay_grad_averaging": False,
    "use_ext_grad_buffer": False,
}


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


def factory(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def ready_made() -> torch.optim.Optimizer:
    return factory(parameters())


def settle(optimizer: Any, params: Any, **given: Any) -> ModeOptions:
    return ModeOptions(**DEFAULTS | given).settle(optimizer, params)


@pytest.mark.parametrize(
    ("given", "made", "reason"),
    [
        (
            {"delay_grad_averaging": True, "delay_optimizer_step": False},
            False,
            "a step cannot come before its gradients",
        ),
        ({"delay_optimizer_step": True, "offload_optimizer": False}, False, "delay_optimizer_step=True needs offload"),
        ({"offload_optimizer": True}, True, "offload_optimizer=True needs an optimizer factory"),
        ({"delay_optimizer_step": True}, True, "a ready-made optimizer steps the model's parameters"),
        ({"delay_grad_averaging": True}, True, "a ready-made optimizer steps the model's parameters"),
        ({"grad_averager": None, "reuse_grad_buffers": True}, False, "reuse_grad_buffers=True has no use"),
        ({"grad_averager": None, "delay_grad_averaging": True}, False, "delay_grad_averaging=True has no use"),
        ({"grad_averager": None, "use_ext_grad_buffer": True}, False, "use_ext_grad_buffer=True has no use"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_reason(given: dict, made: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        settle(ready_made(), None, **given) if made else settle(factory, parameters(), **given)


def test_parameters_for_a_factory_mean_offloading_unless_told_otherwise() -> None:
    assert settle(factory, parameters()).offload_optimizer
    assert not settle(factory, parameters(), offload_optimizer=False).offload_optimizer
    assert not settle(ready_made(), None).offload_optimizer


@pytest.mark.parametrize(
    ("given", "timing"),
    [
        ({}, Timing.AT_ONCE),
        ({"delay_optimizer_step": True}, Timing.DELAYED_STEP),
        ({"delay_grad_averaging": True}, Timing.DELAYED_AVERAGING),
        ({"delay_grad_averaging": True, "delay_optimizer_step": True}, Timing.DELAYED_AVERAGING),
    ],
)
def test_delayed_gradients_bring_a_delayed_step(given: dict, timing: Timing) -> None:
    assert settle(factory, parameters(), **given).timing is timing


@pytest.mark.parametrize(
    ("local", "several", "every", "expected"),
    [
        (False, False, None, None),
        (True, False, None, 1),
        (False, True, None, 1),
        (True, False, 5, 5),
        (False, False, 3, 3),
    ],
)
def test_how_often_states_are_averaged(local: bool, several: bool, every: int | None, expected: int | None) -> None:
    options = settle(factory, parameters(), **({"grad_averager": None} if local else {}))
    modes = options.modes(StateOptions(average_every=every), target_group_size=8)
    assert modes.average_state_every(several) == expected


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_average_state_every_is_a_number_of_epochs(every: Any) -> None:
    with pytest.raises(ValueError, match="average_state_every"):
        StateOptions(average_every=every)


def test_the_offloaded_optimizer_steps_copies() -> None:
    model = parameters()
    optimizer, place = place_optimizer(factory, model, offload=True)
    assert isinstance(place, Offloaded)
    assert place.model_parameters == tuple(model)
    assert optimizer.param_groups[0]["params"][0] is place.state_parameters[0] is not model[0]
    optimizer, place = place_optimizer(factory, model, offload=False)
    assert isinstance(place, InPlace)
    assert optimizer.param_groups[0]["params"][0] is model[0]


def test_averager_opts_reach_their_component_and_unknown_ones_are_named() -> None:
    config = OptimizerConfig("run", 8)
    made = averager_config(config, options={"target_group_size": 4, "bandwidth": 0.5, "sender_timeout": 3.0})
    assert made.matchmaking.target_group_size == 4
    assert made.bandwidth == 0.5
    assert made.allreduce.sender_timeout == 3.0
    with pytest.raises(TypeError, match=r"there is no 'banwidth'; there are bandwidth"):
        averager_config(config, options={"banwidth": 1.0})


def test_timeouts_for_one_round() -> None:
    config = OptimizerConfig("run", 8, averaging_timeout=40.0)
    assert averager_config(config).allreduce.allreduce_timeout == 40.0
    assert averager_config(config, allreduce_timeout=7.0).allreduce.allreduce_timeout == 7.0
    assert averager_config(config, next_chunk_timeout=2.0).allreduce.sender_timeout == 2.0


def test_the_tolerance_of_states_is_an_averager_option() -> None:
    averager_config(OptimizerConfig("run", 8), options={"state_tolerance": 0.01})
    assert StateOptions(**state_options({"state_tolerance": 0.01})).tolerance == 0.01
    assert state_options(None) == {}
    with pytest.raises(ValueError, match="state_tolerance=0"):
        StateOptions(tolerance=0)


def test_compressing_methods_need_one_group() -> None:
    options = settle(factory, parameters(), grad_averager=PowerSGDGradientAverager.get_factory(averager_rank=1))
    with pytest.raises(ValueError, match="target_group_size: PowerSGD and PowerEF need one group"):
        options.modes(StateOptions(), target_group_size=8)


def test_a_lossy_codec_for_states_needs_one_group() -> None:
    options, lossy = settle(factory, parameters()), StateOptions(compression=Float16Compression())
    with pytest.raises(ValueError, match="state_averaging_compression='float16': with target_group_size"):
        options.modes(lossy, target_group_size=8)
    assert options.modes(lossy).state_compression.name == "none"  # to repair states, which no reference is kept for
    local = settle(factory, parameters(), grad_averager=None)
    assert local.modes(lossy).state_compression.name == "float16"


def test_optimizers_and_schedules_that_want_more_than_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS wants a closure"):
        place_optimizer(torch.optim.LBFGS, parameters(), offload=False)
    with pytest.raises(ValueError, match="LBFGS wants a closure"):
        place_optimizer(torch.optim.LBFGS, parameters(), offload=True)
    made = ready_made()
    with pytest.raises(ValueError, match="ReduceLROnPlateau wants 'metrics'"):
        make_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(made), made, made)
    assert make_scheduler(torch.optim.lr_scheduler.StepLR(made, 2), made, made) is not None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("run_id", 5, TypeError),
        ("target_batch_size", "16", TypeError),
        ("target_batch_size", 1.5, TypeError),
        ("target_batch_size", float("nan"), TypeError),
        ("target_batch_size", True, TypeError),
        ("target_batch_size", 0, ValueError),
        ("matchmaking_time", None, TypeError),
        ("averaging_timeout", "1", TypeError),
        ("load_state_timeout", 0, ValueError),
        ("proceed_alone", "no", TypeError),
    ],
)
def test_values_that_make_no_sense_are_named(name: str, value: Any, expected: type[Exception]) -> None:
    with pytest.raises(expected, match=name):
        OptimizerConfig(**{"run_id": "run", "target_batch_size": 8} | {name: value})


def test_flags_and_codecs_are_checked() -> None:
    with pytest.raises(TypeError, match="reuse_grad_buffers='no': expected True or False"):
        settle(factory, parameters(), reuse_grad_buffers="no")
    with pytest.raises(TypeError, match="load_state_compression=3"):
        StateOptions(load_compression=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params: only for an optimizer factory"):
        settle(ready_made(), parameters())
    with pytest.raises(ValueError, match="allreduce_timeout"):
        averager_config(OptimizerConfig("run", 8), allreduce_timeout=0)
