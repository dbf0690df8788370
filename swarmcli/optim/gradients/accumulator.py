"""Gradients of many small batches as one gradient of a large one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class GradientAccumulator:
    """Sums of gradients over samples, and the buffers in which their mean over the swarm arrives.

    `accumulators[i]` and `averaged[i]` have the shape of `parameters[i]`; both are kept in float32 where a parameter
    has a shorter type, since sums over an epoch would lose what small gradients add. Sums live beside their
    parameters, averages in host memory, where the network writes them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        if not parameters:
            raise ValueError("parameters: expected at least one tensor with requires_grad")
        self.parameters = tuple(parameters)
        self.accumulators = tuple(_zeros(parameter, parameter.device) for parameter in self.parameters)
        self.averaged = tuple(_zeros(parameter, torch.device("cpu")) for parameter in self.parameters)
        self.samples = 0  # whose gradients are in the sums
        self.times = 0  # calls of `add` since the last reset

    @torch.no_grad()
    def add(self, batch_size: int) -> None:
        """Adds the parameters' present gradients, each the mean over `batch_size` samples.

        A parameter without gradient adds nothing. Raises ValueError, and adds nothing at all, if the batch size is
        not positive or a gradient is sparse or of another shape than its buffer.
        """
        if batch_size <= 0:
            raise ValueError(f"batch_size={batch_size!r}: expected a positive number of samples")
        gradients = [parameter.grad for parameter in self.parameters]
        for index, (gradient, total) in enumerate(zip(gradients, self.accumulators, strict=True)):
            if gradient is not None and (gradient.is_sparse or gradient.shape != total.shape):
                raise ValueError(
                    f"gradient {index} has shape {tuple(gradient.shape)} and layout {gradient.layout}: "
                    f"expected a dense one of shape {tuple(total.shape)}, as at the start of training"
                )
        for gradient, total in zip(gradients, self.accumulators, strict=True):
            if gradient is not None:
                total.add_(gradient, alpha=batch_size)
        self.samples += batch_size
        self.times += 1

    @torch.no_grad()
    def load_means(self) -> bool:
        """Writes the mean over this peer's samples into `averaged`; zeros if it has none. Whether all is finite."""
        for total, mean in zip(self.accumulators, self.averaged, strict=True):
            mean.copy_(total)
            if self.samples:
                mean.div_(self.samples)
        return all(bool(mean.isfinite().all()) for mean in self.averaged)

    def reset(self) -> None:
        for total in self.accumulators:
            total.zero_()
        self.samples = self.times = 0

    @contextmanager
    def averaged_as_gradients(self) -> Iterator[None]:
        """Inside the block `parameter.grad` is the averaged gradient; the user's own gradients come back after it."""
        users = [parameter.grad for parameter in self.parameters]
        try:
            for parameter, mean in zip(self.parameters, self.averaged, strict=True):
                parameter.grad = mean.to(dtype=parameter.dtype, device=parameter.device)
            yield
        finally:
            for parameter, gradient in zip(self.parameters, users, strict=True):
                parameter.grad = gradient


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of this type are summed and averaged."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _zeros(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(parameter.shape, dtype=sum_type(parameter.dtype), device=device)
