"""What frameworks do to the gradients of one peer before they call `step`, and would go wrong in silence: refused."""

from __future__ import annotations

import sys
from operator import attrgetter
from types import FrameType

from swarmcli.errors import OptimizerError

# Whose modules begin how, the variable and setting of a frame there that tells of clipping, and where to switch it off.
_CLIPPING = (
    (("transformers.",), "self", "args.max_grad_norm", "write `max_grad_norm=0` in its TrainingArguments"),
    (("lightning.", "pytorch_lightning."), "trainer", "gradient_clip_val", "leave `gradient_clip_val` out of it"),
)


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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        for packages, variable, setting, remedy in _CLIPPING:
            if module.startswith(packages) and (owner := frame.f_locals.get(variable)) is not None:
                norm = _read(owner, setting)
                if norm:
                    raise OptimizerError(
                        f"step: {type(owner).__name__} clips the gradients of each of this peer's batches to {norm:g}, "
                        f"which changes the average of all peers: {remedy}, and give the Optimizer "
                        f"max_grad_norm={norm:g}, which clips the average"
                    )
        frame = frame.f_back


def _read(owner: object, setting: str) -> float:
    try:
        return float(attrgetter(setting)(owner) or 0.0)
    except (AttributeError, TypeError, ValueError):  # not what it looks like
        return 0.0
