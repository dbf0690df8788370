"""An optimizer's settings and a scheduler's schedule by what they mean, whatever version of a library holds them.

States are hashed and compared, so equal ones have to be described by equal bytes, also where torch 2.6 and 2.13 share a
run. How a version computes (`foreach`, `fused`) and what its schedulers note for themselves (`_step_count`) is each
peer's own and never travels. Settings that are off (False or None) are not named: libraries add options that way.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from swarmcli.optim.state.statistics import fit, is_plain, to_plain

# How an optimizer computes, which parameters it has, and what its class says already.
_OWN_SETTINGS = frozenset(
    ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
)
# Every scheduler of torch notes these for itself, in some version.
_OWN_NOTES = frozenset(("verbose", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, as plain values. In one order, whoever made the group."""
    return _named({key: value for key, value in group.items() if key not in _OWN_SETTINGS})


def fit_settings(groups: Sequence[Mapping[str, Any]], told: Any) -> list[dict[str, Any]]:
    """These groups with the settings that others told of theirs. Raises ValueError, which names where they differ."""
    if not isinstance(told, list | tuple) or len(told) != len(groups):
        raise ValueError(f"groups: expected {len(groups)} items, got {told!r:.60}")
    return [
        {**own, **_fit(own, new, _OWN_SETTINGS, f"groups[{index}]")}
        for index, (own, new) in enumerate(zip(groups, told, strict=True))
    ]


def schedule_of(scheduler: Any) -> dict[str, Any]:
    """Where a scheduler stands, and what it goes by, as plain values; those that it is made of are `schedulers`."""
    state = scheduler.state_dict()
    own = _own_notes(scheduler, state)
    schedule = _named({key: value for key, value in state.items() if key not in own})
    parts = _parts(scheduler, state)
    return {**schedule, "schedulers": [schedule_of(part) for part in parts]} if parts else schedule


def fit_schedule(scheduler: Any, told: Any, rates: Sequence[Any], where: str = "scheduler") -> dict[str, Any]:
    """Makes what the scheduler's `load_state_dict` takes to stand where others told that theirs does. `rates`: the
    learning rates of the groups then. Raises ValueError, which names where they differ."""
    if not isinstance(told, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {type(told).__name__}")
    state = scheduler.state_dict()
    parts = _parts(scheduler, state)
    # Checkpoints of former versions have all that the scheduler of their writer had.
    new_parts = told.get("schedulers", told.get("_schedulers", [])) if parts else []
    if not isinstance(new_parts, list | tuple) or len(new_parts) != len(parts):
        raise ValueError(f"{where}.schedulers: expected {len(parts)} items, got {new_parts!r:.60}")
    own = _own_notes(scheduler, {**state, **told}) | ({"schedulers"} if parts else set())
    fitted = {**state, **_fit(state, told, own, where)}
    if parts:
        fitted["_schedulers"] = [
            fit_schedule(part, new, rates, f"{where}.schedulers[{index}]")
            for index, (part, new) in enumerate(zip(parts, new_parts, strict=True))
        ]
    if "_last_lr" in state:
        fitted["_last_lr"] = list(rates)
    if "_step_count" in state and isinstance(fitted.get("last_epoch"), int):
        fitted["_step_count"] = max(fitted["last_epoch"], 0) + 1
    return fitted


def schedule_asked(scheduler: Any, told: Mapping[str, Any], epoch: int) -> tuple[Any, list[str]] | None:
    """The scheduler as its user has just made it, stepped to the epoch of a checkpoint, and the names in which it is
    not what the checkpoint `told`; its optimizer is a double, whose groups have the rates. None: it is equal, or has
    been used already, or goes by more than epochs."""
    if getattr(scheduler, "last_epoch", None) != 0:
        return None
    groups = [{k: value for k, value in group.items() if k != "params"} for group in scheduler.optimizer.param_groups]
    twin = _twin(scheduler, SimpleNamespace(param_groups=groups))
    try:
        for _ in range(epoch):
            twin.step()
    except Exception:  # it wants a metric, or its schedule is over by then
        return None
    others = [name for name, value in schedule_of(twin).items() if told.get(name, value) != value]
    return (twin, others) if others else None


def _twin(scheduler: Any, optimizer: Any) -> Any:
    twin = copy.copy(scheduler)
    twin.optimizer, twin._step_count = optimizer, 2  # at the first step torch asks whether the optimizer has stepped
    if parts := _parts(scheduler, scheduler.state_dict()):
        twin._schedulers = [_twin(part, optimizer) for part in parts]
    return twin


def _parts(scheduler: Any, state: Mapping[str, Any]) -> Sequence[Any]:
    """The schedulers that one is made of."""
    parts = getattr(scheduler, "_schedulers", ())
    return parts if "_schedulers" in state and all(hasattr(part, "state_dict") for part in parts) else ()


def _own_notes(scheduler: Any, state: Mapping[str, Any]) -> frozenset[str]:
    """The keys that mean something to the scheduler's own version alone: of torch's own ones all private ones."""
    if not type(scheduler).__module__.startswith("torch."):
        return _OWN_NOTES | ({"_schedulers"} if _parts(scheduler, state) else frozenset())
    return _OWN_NOTES | {key for key in state if isinstance(key, str) and key.startswith("_")}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """As plain values, without what is off; what cannot be plain is left out."""
    return {key: to_plain(values[key]) for key in sorted(values, key=str) if _says(values[key])}


def _says(value: Any) -> bool:
    return value is not None and value is not False and is_plain(value)


def _fit(template: Mapping[str, Any], told: Any, own: frozenset[str] | set[str], where: str) -> dict[str, Any]:
    """Puts what was told into the template's form, without the keys that are each peer's own."""
    if not isinstance(told, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {type(told).__name__}")
    here = {key: value for key, value in template.items() if key not in own and is_plain(value)}
    new = {key: value for key, value in told.items() if key not in own and value is not None and value is not False}
    may_be_off = {key for key, value in here.items() if value is None or isinstance(value, bool)}
    if differing := (new.keys() - here.keys()) | (here.keys() - new.keys() - may_be_off):
        raise ValueError(f"{where}: keys differ in {', '.join(sorted(map(str, differing))[:5])}")
    return {
        key: fit(value, new[key], f"{where}.{key}") if key in new else (False if isinstance(value, bool) else None)
        for key, value in here.items()
    }
