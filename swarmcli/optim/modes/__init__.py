"""The ways to train, one file for each, and which one the Optimizer's `grad_averager` chooses.

A new way is a subclass of Mode, which is synchronous training, in a file here, a line in MODES, and a key or a value
of the recipe. A new way to average gradients (`gradient_averaging.method`) is a GradientMethod in `optim/gradients`
and its averager. Search for `powersgd` to find what names one: the recipe's checks, the memory that it takes, and its
words for people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from swarmcli.optim.gradients.grad_averager import GradientAverager
from swarmcli.optim.gradients.low_rank_averagers import PowerEFGradientAverager, PowerSGDGradientAverager
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.low_rank import PowerEF, PowerSGD
from swarmcli.optim.modes.outer import LocalUpdates, OuterSteps, SparseOuterSteps
from swarmcli.optim.modes.outer import Outer as Outer
from swarmcli.optim.modes.sparse import Sparse

MODES: Mapping[Any, type[Mode]] = {
    None: LocalUpdates,
    GradientAverager: Mode,
    PowerSGDGradientAverager: PowerSGD,
    PowerEFGradientAverager: PowerEF,
    Sparse: Sparse,
}
WITH_OUTER: Mapping[Any, type[Mode]] = {GradientAverager: OuterSteps, Sparse: SparseOuterSteps}


def choose_mode(grad_averager: Callable[..., Any] | None, outer: Outer | None = None, **common: Any) -> Mode:
    """Returns the mode for an averager class, for what its `get_factory` returned, for None, or for `Sparse` or a
    partial of it; with `outer`, one of outer steps. `common`: the options that all modes have.

    Raises TypeError for anything else, and for options that the mode does not have; ValueError for options that cannot
    work together.
    """
    kind: Any = grad_averager
    options: dict[str, Any] = {}
    if isinstance(grad_averager, partial):
        kind, options = grad_averager.func, grad_averager.keywords
        if grad_averager.args:
            raise TypeError(f"grad_averager: give {kind.__name__} its options by name, got {grad_averager.args!r}")
    if kind not in MODES:
        raise TypeError(f"grad_averager: expected GradientAverager or one of its kind, got {grad_averager!r}")
    if outer is not None:
        if kind not in WITH_OUTER:
            raise ValueError(f"outer: differences are averaged by GradientAverager or Sparse, not by {grad_averager!r}")
        common["outer"] = outer
    mode = MODES[kind] if outer is None else WITH_OUTER[kind]
    own = {field.name: field for field in fields(mode) if field.name not in {each.name for each in fields(Mode)}}
    if unknown := options.keys() - own:
        raise TypeError(
            f"grad_averager: {kind.__name__} takes no {min(unknown)!r} here; options of the averager itself belong "
            f"in averager_opts, others have arguments of the Optimizer"
        )
    if "averager_rank" in own.keys() - options:
        raise TypeError(f"grad_averager: {kind.__name__}.get_factory needs averager_rank")
    return mode(**options, **common)
