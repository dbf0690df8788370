"""How far an epoch's step went, and whether that was far more than usual: a jump of the loss can be explained by it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

SAMPLED = 1 << 20  # values of the parameters whose way is measured, evenly taken; of fewer all
USUAL_OF = 6  # steps whose median is the usual norm: it falls quickly while a model begins to learn
LEAST_KNOWN = 5  # steps before any is called unusual
FAR = 3.0  # times the usual norm: the least that was seen where a loss jumped; noise makes less of it


@dataclass(frozen=True, slots=True)
class StepNorms:
    """Euclidean norms over all trained parameters; None: not finite."""

    gradient: float | None  # of the average as the optimizer got it: before it clips
    update: float | None  # of the change of the parameters; an estimate where there are more than SAMPLED values


def measure_step(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], step: Callable[[], object]
) -> StepNorms:
    """Makes the step. Reads the gradients once, and keeps a copy of at most about SAMPLED values meanwhile."""
    gradient = math.hypot(*(torch.linalg.vector_norm(each).item() for each in gradients))
    before = _sample(parameters)
    step()
    update = torch.linalg.vector_norm(_sample(parameters) - before).item()
    return StepNorms(*(norm if math.isfinite(norm) else None for norm in (gradient, update)))


@torch.no_grad()
def _sample(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """A vector in host memory, scaled so that its norm is that of all values, about."""
    stride = math.ceil(sum(parameter.numel() for parameter in parameters) / SAMPLED)
    while math.gcd(stride, 210) > 1:  # otherwise it would meet the same columns of a matrix again and again
        stride += 1
    parts = []
    for parameter in parameters:
        part = parameter.detach().flatten()[::stride]
        scale = math.sqrt(parameter.numel() / max(1, part.numel()))
        parts.append(part.to("cpu", torch.promote_types(part.dtype, torch.float32)) * scale)
    return torch.cat(parts) if parts else torch.zeros(0)


class UsualNorms:
    """Remembers the norms of the last steps, and tells of one that went far beyond them: once for each row of such."""

    def __init__(self) -> None:
        names = "averaged gradient (before clipping)", "update"
        self._last = {name: deque[float](maxlen=USUAL_OF) for name in names}
        self._told = False

    def look(self, epoch: int, norms: StepNorms) -> str:
        """Says what to tell a person of the step that led to `epoch`; "": nothing."""
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
        return (
            f"the step to epoch {epoch} was far beyond the usual one: {' and '.join(found)}. If the loss stays "
            "higher, a lower learning rate, more warmup_epochs or max_grad_norm help: write them in a copy of the "
            "recipe with another run_id, and begin it by `swarm monitor COPY --resume CHECKPOINT --from-run RUN`"
        )


def _beyond(norm: float | None, usual: float) -> str:
    usually = f", usually {usual:.3g}" if math.isfinite(usual) else ""
    return ("is not finite" if norm is None else f"was {norm:.3g}") + usually
