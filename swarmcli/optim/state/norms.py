"""How far an epoch's step went, and whether that was far more than usual, which may explain a jump of the loss."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

SAMPLED = 1 << 20  # values of the parameters, evenly taken, whose change is measured; if there are fewer, all
USUAL_OF = 6  # last steps whose median is the usual norm: it falls quickly while a model begins to learn
LEAST_KNOWN = 5  # steps before any counts as unusual
FAR = 3.0  # times the usual norm: the least with which a loss was seen to jump; noise stays below it


@dataclass(frozen=True, slots=True)
class StepNorms:
    """Euclidean norms over all trained parameters; None: not finite."""

    gradient: float | None  # of the average as the optimizer got it: before it clips
    update: float | None  # of the parameters' change; an estimate if there are more than SAMPLED values


def measure_step(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], step: Callable[[], object]
) -> StepNorms:
    """Makes the step and measures it. It reads the gradients once, and keeps a copy of about SAMPLED values at most."""
    gradient = math.hypot(*(torch.linalg.vector_norm(each).item() for each in gradients))
    before = _sample(parameters)
    step()
    update = torch.linalg.vector_norm(_sample(parameters) - before).item()
    return StepNorms(*(norm if math.isfinite(norm) else None for norm in (gradient, update)))


@torch.no_grad()
def _sample(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sample of the values, a vector in host memory, scaled so that its norm is about that of all values."""
    stride = math.ceil(sum(parameter.numel() for parameter in parameters) / SAMPLED)
    while math.gcd(stride, 210) > 1:  # otherwise it would take the same columns of a matrix again and again
        stride += 1
    parts = []
    for parameter in parameters:
        part = parameter.detach().flatten()[::stride]
        scale = math.sqrt(parameter.numel() / max(1, part.numel()))
        parts.append(part.to("cpu", torch.promote_types(part.dtype, torch.float32)) * scale)
    return torch.cat(parts) if parts else torch.zeros(0)


class UsualNorms:
    """Remembers the norms of the last steps, and tells of a step far beyond them: once for each row of such steps."""

    def __init__(self, *, advises: bool = True) -> None:
        """`advises`: it says what the run's owner can do, and not that a volunteer need do nothing."""
        self._advises = advises
        names = "averaged gradient (before clipping)", "update"
        self._last = {name: deque[float](maxlen=USUAL_OF) for name in names}
        self._told = False

    def look(self, epoch: int, norms: StepNorms) -> str:
        """Takes in the norms of the step that led to `epoch`. Returns what to tell people; "": nothing."""
        found = []
        for (name, last), norm in zip(self._last.items(), (norms.gradient, norms.update), strict=True):
            usual = statistics.median(last) if len(last) >= LEAST_KNOWN else math.inf
            if norm is None or norm > FAR * usual:
                found.append(f"the norm of the {name} {_beyond(norm, usual)}")
            if norm is not None:
                last.append(norm)
        said, self._told = self._told, bool(found)
        if said or not found:
            return ""
        what, why = f"the step to epoch {epoch} was far beyond the usual one", " and ".join(found)
        if not self._advises:
            return f"{what}; nothing for a volunteer to do, monitors tell the owner what helps ({why})"
        return (
            f"{what}: {why}. If the loss stays "
            "higher, a lower learning rate, more warmup_epochs or max_grad_norm help: write them in a copy of the "
            "recipe with another run_id, and begin it by `swarm monitor COPY --resume CHECKPOINT --from-run RUN`"
        )


def _beyond(norm: float | None, usual: float) -> str:
    usually = f", usually {usual:.3g}" if math.isfinite(usual) else ""
    return ("is not finite" if norm is None else f"was {norm:.3g}") + usually
