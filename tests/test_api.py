"""The public names, parameters and defaults that users' scripts rely on."""

import inspect
import re
from typing import Any

import pytest

import swarmcli
from swarmcli.compression import NoCompression

NO_COMPRESSION = NoCompression()
SIGNATURES = """\
Optimizer(dht, run_id, target_batch_size, optimizer, batch_size_per_step=None, params=None, scheduler=None,
    matchmaking_time=15.0, averaging_timeout=60.0, allreduce_timeout=None, next_chunk_timeout=None,
    load_state_timeout=600.0, reuse_grad_buffers=False, offload_optimizer=None, delay_optimizer_step=None,
    delay_grad_averaging=False, delay_state_averaging=True, average_state_every=None, client_mode=None, auxiliary=False,
    grad_compression=NO_COMPRESSION, grad_averager=swarmcli.GradientAverager, use_ext_grad_buffer=False,
    state_averaging_compression=NO_COMPRESSION, load_state_compression=NO_COMPRESSION, average_opt_statistics=(),
    extra_tensors=(), averager_opts=None, tracker_opts=None, performance_ema_alpha=0.1, shutdown_timeout=5,
    verbose=False)
Optimizer.step(closure=None, batch_size=None, grad_scaler=None)
Optimizer.zero_grad(set_to_none=False)
ProgressTracker(dht, prefix, target_batch_size, start, client_mode=None, min_refresh_period=0.5, max_refresh_period=10,
    default_refresh_period=3, expected_drift_peers=3, expected_drift_rate=0.2, performance_ema_alpha=0.1,
    metadata_expiration=60.0, status_loglevel=10, private_key=None, daemon=True)
ProgressTracker.report_local_progress(local_epoch, samples_accumulated, update_global_samples=True)
ProgressTracker.update_epoch(new_epoch=None)
GradientAverager(parameters, dht, prefix, reuse_grad_buffers=False, accumulate_grads_on=None, client_mode=None,
    warn=True, averaged_grads=None)
GradientAverager.step(weight=None, reset_accumulators=True, control=None, timeout=None, wait=True)
PowerSGDGradientAverager(parameters, averager_rank, min_compression_ratio=0.5)
PowerEFGradientAverager(parameters, averager_rank)
HierarchicalModelAverager(period_group_size_dict=None, warmup_steps=0, process_group=None)
HierarchicalModelAverager.average_parameters(params)
ZeroRedundancyOptimizer(params, optimizer_class, process_group=None, parameters_as_bucket_view=False,
    overlap_with_ddp=False)
ZeroRedundancyOptimizer.step(closure=None)
ZeroRedundancyOptimizer.consolidate_state_dict(to=0)
"""
CONTRACTS = dict(re.findall(r"^([\w.]+)\((.*?)\)$", SIGNATURES.replace("\n    ", " "), re.MULTILINE))
MEMBERS = {
    "Optimizer": "local_epoch local_progress use_local_updates use_gradient_averaging state_dict load_state_dict state "
    "opt param_groups is_synchronized_with_peers load_state_from_peers is_alive shutdown",
    "ProgressTracker": "report_local_progress update_epoch accumulated_enough_samples pause_updates "
    "ready_to_update_epoch estimated_next_update_time global_epoch global_progress local_progress performance_ema "
    "shutdown",
    "GradientAverager": "accumulate_grads_ schedule_step step use_averaged_gradients load_accumulators_into_averager_ "
    "reset_accumulated_grads_ notify_used_averaged_gradients local_samples_accumulated local_times_accumulated "
    "get_factory",
    "GradScaler": "unscale_ step update scale are_grads_finite running_global_step",
    "ZeroRedundancyOptimizer": "step add_param_group consolidate_state_dict state_dict load_state_dict join_hook "
    "join_device join_process_group",
}


def find(path: str) -> Any:
    found: Any = swarmcli
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", CONTRACTS)
def test_parameters_and_defaults(path: str) -> None:
    parameters = inspect.signature(find(path)).parameters
    expected = inspect.signature(eval(f"lambda {CONTRACTS[path]}: None")).parameters
    for name, parameter in expected.items():
        assert name in parameters, f"{path} has no {name}"
        actual, default = parameters[name].default, parameter.default
        same = isinstance(actual, NoCompression) if default is NO_COMPRESSION else actual == default
        assert same, f"{path}({name}) is {actual!r} unless given"


@pytest.mark.parametrize("path", MEMBERS)
def test_members(path: str) -> None:
    owner = find(path)
    missing = [name for name in MEMBERS[path].split() if not hasattr(owner, name) and name != "opt"]
    assert not missing
