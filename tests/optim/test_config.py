"""Which arguments of the Optimizer go together, and what is said where they do not."""

from typing import Any

import pytest
import torch

from swarmcli.compression import Float16Compression
from swarmcli.optim.arguments import averager_config, choose_timing, make_scheduler, place_optimizer
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.modes.base import StateOptions, Timing
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.low_rank import PowerSGD
from swarmcli.optim.modes.outer import LocalUpdates
from swarmcli.optim.state.replica import InPlace, Offloaded


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


def factory(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def ready_made() -> torch.optim.Optimizer:
    return factory(parameters())


def timing(optimizer: Any, params: Any, **given: Any) -> tuple[Timing, bool]:
    defaults: dict[str, Any] = {"offload": None, "delayed_step": None, "delayed_averaging": False}
    return choose_timing(optimizer, params, **defaults | given)


@pytest.mark.parametrize(
    ("given", "made", "reason"),
    [
        ({"delayed_averaging": True, "delayed_step": False}, False, "a step cannot come before its gradients"),
        ({"delayed_step": True, "offload": False}, False, "delay_optimizer_step=True needs offload"),
        ({"offload": True}, True, "offload_optimizer=True needs an optimizer factory"),
        ({"delayed_step": True}, True, "a ready-made optimizer steps the model's parameters"),
        ({"delayed_averaging": True}, True, "a ready-made optimizer steps the model's parameters"),
    ],
)
def test_delays_that_cannot_work_are_refused_with_the_reason(given: dict, made: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        timing(ready_made(), None, **given) if made else timing(factory, parameters(), **given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"reuse_grad_buffers": True}, "reuse_grad_buffers=True has no use"),
        ({"timing": Timing.DELAYED_AVERAGING}, "delay_grad_averaging=True has no use"),
        ({"share_gradients": True}, "use_ext_grad_buffer=True has no use"),
    ],
)
def test_local_updates_refuse_what_is_for_gradients(given: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LocalUpdates(**given)


def test_parameters_for_a_factory_mean_offloading_unless_told_otherwise() -> None:
    assert timing(factory, parameters()) == (Timing.AT_ONCE, True)
    assert timing(factory, parameters(), offload=False) == (Timing.AT_ONCE, False)
    assert timing(ready_made(), None) == (Timing.AT_ONCE, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Timing.AT_ONCE),
        ({"delayed_step": True}, Timing.DELAYED_STEP),
        ({"delayed_averaging": True}, Timing.DELAYED_AVERAGING),
        ({"delayed_averaging": True, "delayed_step": True}, Timing.DELAYED_AVERAGING),
    ],
)
def test_delayed_gradients_bring_a_delayed_step(given: dict, expected: Timing) -> None:
    assert timing(factory, parameters(), **given)[0] is expected


@pytest.mark.parametrize(
    ("local", "several", "every", "expected"),
    [
        (False, False, None, None),
        (True, False, None, None),
        (True, True, None, 1),
        (False, True, None, 1),
        (True, True, 5, 5),
        (False, False, 3, 3),
    ],
)
def test_how_often_states_are_averaged(local: bool, several: bool, every: int | None, expected: int | None) -> None:
    kind = LocalUpdates if local else Mode
    assert kind(state=StateOptions(average_every=every), target_group_size=8).average_state_every(several) == expected


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
    with pytest.raises(TypeError, match=r"there is no 'banwidth'; there are aggregator, audit, bandwidth"):
        averager_config(config, options={"banwidth": 1.0})


def test_timeouts_for_one_round() -> None:
    config = OptimizerConfig("run", 8, averaging_timeout=40.0)
    assert averager_config(config).allreduce.allreduce_timeout == 40.0
    assert averager_config(config, allreduce_timeout=7.0).allreduce.allreduce_timeout == 7.0
    assert averager_config(config, next_chunk_timeout=2.0).allreduce.sender_timeout == 2.0


def test_the_tolerance_of_states_is_between_nothing_and_everything() -> None:
    with pytest.raises(ValueError, match="state_tolerance=0"):
        StateOptions(tolerance=0)


def test_compressing_methods_need_one_group() -> None:
    with pytest.raises(ValueError, match="target_group_size: PowerSGD and PowerEF need one group"):
        PowerSGD(averager_rank=1, target_group_size=8)


def test_a_lossy_codec_for_states_beside_gradients_needs_one_group() -> None:
    lossy = StateOptions(compression=Float16Compression())
    with pytest.raises(ValueError, match="state_averaging_compression='float16': with target_group_size"):
        Mode(state=lossy, target_group_size=8)
    assert LocalUpdates(state=lossy, target_group_size=8).local  # differences from the anchor travel


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
        Mode(reuse_grad_buffers="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="load_state_compression=3"):
        StateOptions(load_compression=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params: only for an optimizer factory"):
        timing(ready_made(), parameters())
    with pytest.raises(ValueError, match="allreduce_timeout"):
        averager_config(OptimizerConfig("run", 8), allreduce_timeout=0)
