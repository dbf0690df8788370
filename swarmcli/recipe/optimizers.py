"""The optimizers that a recipe can name: torch's, by name and arguments, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer of torch.optim. Arguments that only concern devices (`foreach`, `fused` …) are not for a recipe: all
    peers compute the same."""

    torch_name: str
    statistics: tuple[str, ...]  # tensors as large as a parameter, by torch's names
    # keys of a recipe's `optimizer` section, with torch's defaults
    keys: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)  # further arguments, with torch's defaults


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
_MOMENTS = ("exp_avg", "exp_avg_sq")

OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind("AdamW", _MOMENTS, _ADAM, {"amsgrad": False}),
    "adam": OptimizerKind("Adam", _MOMENTS, _ADAM, {"amsgrad": False, "decoupled_weight_decay": False}),
    "sgd": OptimizerKind("SGD", ("momentum_buffer",), {"momentum": 0.0}, {"nesterov": False, "dampening": 0.0}),
    # Matrices within the model by Muon, all else by AdamW: as one optimizer, see training/muon.py.
    "muon": OptimizerKind("Muon", _MOMENTS, {"momentum": 0.95, **_ADAM}, {"nesterov": True, "ns_steps": 5}),
    "adamax": OptimizerKind("Adamax", ("exp_avg", "exp_inf"), _ADAM),
    "nadam": OptimizerKind("NAdam", _MOMENTS, _ADAM, {"momentum_decay": 0.004, "decoupled_weight_decay": False}),
    "radam": OptimizerKind("RAdam", _MOMENTS, _ADAM, {"decoupled_weight_decay": False}),
    "adagrad": OptimizerKind("Adagrad", ("sum",), {"eps": 1e-10}, {"lr_decay": 0.0, "initial_accumulator_value": 0.0}),
    "adadelta": OptimizerKind("Adadelta", ("square_avg", "acc_delta"), {"eps": 1e-6}, {"rho": 0.9}),
    "adafactor": OptimizerKind("Adafactor", (), {}, {"beta2_decay": -0.8, "d": 1.0}),
    "rmsprop": OptimizerKind(
        "RMSprop",
        ("square_avg", "momentum_buffer", "grad_avg"),
        {"momentum": 0.0, "eps": 1e-8},
        {"alpha": 0.99, "centered": False},
    ),
    "rprop": OptimizerKind("Rprop", ("prev", "step_size"), {}, {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)}),
    "asgd": OptimizerKind("ASGD", ("ax",), {}, {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6}),
}
KEYS = ("betas", "eps", "momentum")  # keys of a recipe's `optimizer` section that only some optimizers take


def check_args(name: str, args: Mapping[str, Any]) -> None:
    """Raises ValueError, with the fix, for arguments that this optimizer does not take or that have another type."""
    known = OPTIMIZERS[name].args
    for key, value in args.items():
        if key in KEYS:
            raise ValueError(f"{key} stands one level up; write `optimizer.{key}: {value}`")
        if key not in known:
            near = get_close_matches(key, [*known, *KEYS], n=1)
            listed = ", ".join(known) or "none"
            hint = f"did you mean {near[0]}?" if near else f"remove it; it takes {listed}"
            raise ValueError(f"{name} takes no argument {key!r:.80} here; {hint}")
        usual = known[key]
        fits = (
            isinstance(value, bool)
            if isinstance(usual, bool)
            else isinstance(value, list | tuple) and len(value) == len(usual) and all(map(_is_number, value))
            if isinstance(usual, tuple)
            else _is_number(value) and (isinstance(usual, float) or isinstance(value, int))
        )
        if not fits:
            raise ValueError(f"{key} is {value!r:.80}; it is usually {usual!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
