"""Functional optimizers: those whose step takes the gradients as an argument, and may take those of a few parameters.

torch has such variants of some of its optimizers (torch.distributed.optim), but they are deprecated TorchScript, keep
their own copy of the learning rate, so that a schedule is not seen, and Adagrad's updates the wrong parameters when
only some have a gradient. Here an ordinary optimizer is stepped with the gradients it is handed instead; whoever names
one of torch's functional classes gets the ordinary optimizer that it is a variant of.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

# The classes whose step treats each parameter by itself, so that it may be done in parts. LBFGS's does not.
STEPPED_IN_PARTS: frozenset[type[Optimizer]] = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
)


class FunctionalOptimizer:
    """An optimizer of one parameter group, stepped with gradients that are handed in and not with those in `.grad`.

    `state`, `param_groups` and `defaults` are the wrapped optimizer's own.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.state = optimizer.state
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults

    def step(self, *, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Updates these of its parameters, each by its gradient (of the same shape and type), and no others.

        `.grad` is as before afterwards, whether or not the step raises.
        """
        group = self.param_groups[0]
        everything, former = group["params"], {parameter: parameter.grad for parameter in gradients}
        group["params"] = list(gradients)
        try:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            group["params"] = everything
            for parameter, gradient_before in former.items():
                parameter.grad = gradient_before


def is_functional(optimizer_class: Any) -> bool:
    """Whether this is one of torch's functional optimizers, which hooks can step while the backward pass runs."""
    return optimizer_class in _torchs_variants().values()


def functional_equivalent(optimizer_class: Any) -> type[Optimizer]:
    """The ordinary class to wrap for `optimizer_class`, be that an ordinary or one of torch's functional ones.

    Raises ValueError for a class not known to treat each parameter by itself; one's own may be made known with torch's
    `register_functional_optim`.
    """
    variants = _torchs_variants()
    ordinary = {variant: each for each, variant in variants.items()}.get(optimizer_class, optimizer_class)
    if ordinary in STEPPED_IN_PARTS or (ordinary in variants and issubclass(ordinary, Optimizer)):
        return ordinary
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    raise ValueError(
        f"overlap_with_ddp=True needs an optimizer with a functional variant, and {name} has none: "
        f"use one of {', '.join(sorted(each.__name__ for each in STEPPED_IN_PARTS))}, or, if yours treats each "
        "parameter by itself, make it known: torch.distributed.optim.utils.register_functional_optim(cls, cls)"
    )


def _torchs_variants() -> Mapping[Any, Any]:
    """By ordinary class. Who has one of the variants has imported them; doing so compiles TorchScript for a second."""
    module = sys.modules.get("torch.distributed.optim.utils")
    return {} if module is None else module.functional_optim_map
