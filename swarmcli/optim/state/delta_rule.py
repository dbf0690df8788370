"""The delta rule: state += average - state as it was copied. What a peer learned meanwhile is kept.

For means of squares that sum alone would be wrong: where the state and the average have both fallen below what was
copied it comes out near zero or negative, and Adam divides by its root. So they never fall below both.
"""

from __future__ import annotations

import torch


def moved(live: torch.Tensor, average: torch.Tensor, before: torch.Tensor, *, squares: bool) -> torch.Tensor:
    """Where the state `live` should be, in host memory; all of one shape, `average` and `before` in host memory.

    Where it stands as it was copied, or was not finite when it was, that is the average itself.
    """
    present = live.cpu()
    exact = torch.float32 if present.dtype.itemsize < 4 else present.dtype
    change = average.to(exact) - before.to(exact)
    result = (present.to(exact) + change).to(average.dtype)
    result = torch.where((present == before) | ~before.isfinite(), average, result)
    return torch.fmax(result, torch.fmin(present, average)) if squares else result
