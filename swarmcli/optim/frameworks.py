"""Refuses what frameworks do to the gradients of one peer before they call `step`, and would go wrong in silence."""

from __future__ import annotations

import sys
from functools import reduce
from traceback import walk_stack
from typing import Any

from swarmcli.errors import OptimizerError

# By package: the variable of its frames, and the attributes of that, which tell of clipping.
_CLIPPING = {
    "transformers": ("self", "args", "max_grad_norm"),
    "lightning": ("trainer", "gradient_clip_val"),
    "pytorch_lightning": ("trainer", "gradient_clip_val"),
}


def refuse_partial_sums() -> None:
    """Raises OptimizerError within accelerate's `accumulate()`, but for the batch that ends an accumulation: accelerate
    has divided the losses by their number, and steps what it has prepared behind the last one alone."""
    state = sys.modules.get("accelerate.state")
    if state is not None and state.GradientState._shared_state.get("sync_gradients") is False:
        raise OptimizerError(
            "step: accelerate is accumulating, and has divided the loss of this batch by gradient_accumulation_steps. "
            "Hand the Optimizer to accelerator.prepare() too, which then steps it behind the last batch and saves it, "
            "and give it batch_size_per_step = batch size × gradient_accumulation_steps (examples/README.md)"
        )


def refuse_local_clipping() -> None:
    """Raises OptimizerError if a Trainer of transformers, trl or Lightning that clips gradients is what calls `step`:
    clipped batches have another average than one process would get that clips the whole batch."""
    for frame, _ in walk_stack(None):
        variable, *names = _CLIPPING.get(str(frame.f_globals.get("__name__")).partition(".")[0], ("",))
        found: Any = frame.f_locals.get(variable)
        if norm := reduce(lambda owner, name: getattr(owner, name, None), names, found):
            raise OptimizerError(
                f"step: a Trainer clips the gradients of each of this peer's batches to {norm}, which changes the "
                "average of all peers: write `max_grad_norm=0` there (Lightning: no `gradient_clip_val`), and give the "
                f"Optimizer max_grad_norm={norm}, which clips the average"
            )
