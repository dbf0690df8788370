"""Refuses what frameworks do to one peer's gradients before they call `step`, and what would go wrong in silence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import reduce
from traceback import walk_stack

import torch

from swarmcli.errors import OptimizerError

# Package → the variable in its frames, then the attributes that lead from that to its norm for clipping.
_CLIPPING = {
    "transformers": ("self", "args", "max_grad_norm"),
    "lightning": ("trainer", "gradient_clip_val"),
    "pytorch_lightning": ("trainer", "gradient_clip_val"),
}


_UNPREPARED = (
    "step: accelerate knows the model and not this Optimizer, so save_state leaves it out, and inside accumulate() it "
    "gets a fraction of each gradient: hand it to accelerator.prepare() too, with batch_size_per_step = batch size × "
    "gradient_accumulation_steps, and step what that returns (examples/README.md)"
)


def refuse_partial_sums() -> None:
    """Raises OptimizerError within accelerate's `accumulate()`, except at the batch that ends an accumulation: there
    accelerate has divided each loss by the number of batches, and steps only what it has prepared, after the last one.
    """
    state = sys.modules.get("accelerate.state")
    if state is not None and state.GradientState._shared_state.get("sync_gradients") is False:
        raise OptimizerError(_UNPREPARED)


def look_at_callers(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Raises OptimizerError if the caller of `step` is a Trainer of transformers, trl or Lightning that clips gradients
    (the average of clipped batches is not the clipped average), or has an Accelerator that was given the model of these
    parameters but not the optimizer."""
    for frame, _ in walk_stack(None):
        variable, *names = _CLIPPING.get(str(frame.f_globals.get("__name__")).partition(".")[0], ("",))
        if norm := reduce(lambda owner, name: getattr(owner, name, None), names, frame.f_locals.get(variable)):
            raise OptimizerError(
                f"step: a Trainer clips the gradients of each of this peer's batches to {norm}, which changes the "
                "average of all peers: write `max_grad_norm=0` there (Lightning: no `gradient_clip_val`), and give the "
                f"Optimizer max_grad_norm={norm}, which clips the average"
            )
        for found in list(frame.f_locals.values()):
            if type(found).__module__ == "accelerate.accelerator" and type(found).__name__ == "Accelerator":
                saved = [*(each.optimizer for each in found._optimizers), *found._custom_objects]
                of_models = (each for model in found._models for each in model.parameters())
                if optimizer not in saved and any(each is parameters[0] for each in of_models):
                    raise OptimizerError(_UNPREPARED)
