"""An optimizer's settings and a scheduler's schedule by what they mean, whatever version of a library holds them.

States are hashed and compared, so equal ones must have equal bytes, even if torch 2.6 and 2.13 share a run. How a
version computes (`foreach`, `fused`) and what its schedulers note for themselves (`_step_count`) belongs to each peer,
and never travels. Settings that are off (False or None) are left out, since libraries add options that are off.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from swarmcli.optim.state.statistics import fit, is_plain, to_plain

# Settings that say how an optimizer computes, which parameters it has, or what its class says already.
_OWN_SETTINGS = frozenset(
    ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
)
# Schedulers of torch note these for themselves, in some version.
_OWN_NOTES = frozenset(("verbose", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group as plain values, always in the same order."""
    return _named({key: value for key, value in group.items() if key not in _OWN_SETTINGS})


def fit_settings(groups: Sequence[Mapping[str, Any]], told: Any) -> list[dict[str, Any]]:
    """Returns these groups with the settings that another peer told of its own. Raises ValueError, which names where
    they differ."""
    if not isinstance(told, list | tuple) or len(told) != len(groups):
        raise ValueError(f"groups: expected {len(groups)} items, got {told!r:.60}")
    return [
        {**own, **_fit(own, new, _OWN_SETTINGS, f"groups[{index}]")}
        for index, (own, new) in enumerate(zip(groups, told, strict=True))
    ]


def schedule_of(scheduler: Any) -> dict[str, Any]:
    """Where a scheduler stands, and by what it goes, as plain values. `schedulers`: the same of those inside it."""
    state = scheduler.state_dict()
    own = _own_notes(scheduler, state)
    schedule = _named({key: value for key, value in state.items() if key not in own})
    parts = _parts(scheduler, state)
    return {**schedule, "schedulers": [schedule_of(part) for part in parts]} if parts else schedule


def fit_schedule(scheduler: Any, told: Any, rates: Sequence[Any], where: str = "scheduler") -> dict[str, Any]:
    """Returns what the scheduler's `load_state_dict` takes to stand where another peer told that its own does. `rates`:
    the learning rates of the groups at that point. Raises ValueError, which names where they differ."""
    if not isinstance(told, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {type(told).__name__}")
    state = scheduler.state_dict()
    parts = _parts(scheduler, state)
    # Checkpoints of earlier versions have everything that their writer's scheduler had.
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
    """A copy of a scheduler that its user has just made, stepped to the `epoch` of a checkpoint, and the names in which
    it differs from what the checkpoint `told`. Its optimizer is a double, whose groups have the rates. None: it does
    not differ, or has been used already, or goes by more than epochs."""
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
    twin.optimizer, twin._step_count = optimizer, 2  # at 1 torch looks whether the optimizer has stepped, and warns
    if parts := _parts(scheduler, scheduler.state_dict()):
        twin._schedulers = [_twin(part, optimizer) for part in parts]
    return twin


def _parts(scheduler: Any, state: Mapping[str, Any]) -> Sequence[Any]:
    """The schedulers that a composite scheduler consists of; () for any other scheduler."""
    parts = getattr(scheduler, "_schedulers", ())
    return parts if "_schedulers" in state and all(hasattr(part, "state_dict") for part in parts) else ()


def _own_notes(scheduler: Any, state: Mapping[str, Any]) -> frozenset[str]:
    """The keys that mean something only to the scheduler's version: of a scheduler of torch all private ones."""
    if not type(scheduler).__module__.startswith("torch."):
        return _OWN_NOTES | ({"_schedulers"} if _parts(scheduler, state) else frozenset())
    return _OWN_NOTES | {key for key in state if isinstance(key, str) and key.startswith("_")}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as plain ones, without what is off or cannot be plain."""
    return {key: to_plain(values[key]) for key in sorted(values, key=str) if _says(values[key])}


def _says(value: Any) -> bool:
    return value is not None and value is not False and is_plain(value)


def _fit(template: Mapping[str, Any], told: Any, own: frozenset[str] | set[str], where: str) -> dict[str, Any]:
    """Puts what was told into the template's form, without the keys that belong to each peer (`own`)."""
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
