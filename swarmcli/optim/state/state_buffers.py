"""What peers average of their training states, as copies in host memory, and how the average comes back.

    state ──load──▶ buffers ── a round ──▶ the average ──apply──▶ state += average - state as it was loaded

That is the delta rule: what a peer learned while the round was under way is kept. Where nothing was learned meanwhile
the average is assigned, bit for bit, so that peers end with equal states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from swarmcli.compression import CompressionInfo, TensorDescriptor, TensorRole
from swarmcli.errors import OptimizerError


class StateBuffers:
    """`tensors`: parameters, chosen statistics of the optimizer and extra tensors of one training state, on the host.

    Statistics are averaged by name (`exp_avg`, `momentum_buffer`, …) where they have the shape of their parameter; one
    that the optimizer has not made yet counts as zero, as it would begin. Extra tensors that are no floating-point
    numbers are left alone: batch norm's counter of batches, for one, counts what this peer computed, and neither a
    mean nor a maximum of it means anything. Newcomers download them with the state.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        self._optimizer = optimizer
        self._names = tuple(dict.fromkeys(statistics))
        self._parameters = tuple(parameter for parameter in parameters if parameter.is_floating_point())
        self._trained = tuple(parameter for parameter in self._parameters if parameter.requires_grad)
        self._extra = tuple(tensor for tensor in extra_tensors if tensor.is_floating_point())
        models = [*self._parameters, *(p for p in self._trained for _ in self._names), *self._extra]
        # Memory that nobody has written to costs nothing yet: before the first round these only have addresses.
        self.tensors = [torch.empty(model.shape, dtype=model.dtype) for model in models]
        self._before: list[torch.Tensor] | None = None  # what was loaded, unless nothing can change meanwhile
        self.check_statistics()

    @property
    def infos(self) -> tuple[CompressionInfo, ...]:
        """For codecs that choose by the role of a tensor."""
        of_parameters, of_statistics = len(self._parameters), len(self._trained) * len(self._names)
        roles = [TensorRole.PARAMETER] * of_parameters + [TensorRole.OPTIMIZER] * of_statistics
        roles += [TensorRole.UNSPECIFIED] * len(self._extra)
        described = enumerate(zip(self.tensors, roles, strict=True))
        return tuple(CompressionInfo(TensorDescriptor.of(tensor), index, role) for index, (tensor, role) in described)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def check_statistics(self) -> None:
        """Raises OptimizerError, which names the statistic, if the optimizer has made some and this is none of them."""
        for parameter in self._trained:
            made = self._optimizer.state.get(parameter, {})
            for name in self._names:
                if made and name not in made:
                    there_are = ", ".join(map(str, made))
                    raise OptimizerError(f"average_opt_statistics: there is no {name!r}; there are {there_are}")
                value = made.get(name)
                if value is not None and (not isinstance(value, torch.Tensor) or value.shape != parameter.shape):
                    form = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                    raise OptimizerError(
                        f"average_opt_statistics: {name!r} has {form}; what can be averaged has its parameter's shape, "
                        f"{tuple(parameter.shape)}"
                    )

    @torch.no_grad()
    def load(self, *, changes: bool) -> None:
        """Copies the state into the buffers. `changes`: it may change before `apply`, which costs another copy."""
        self.check_statistics()
        if changes and self._before is None:
            self._before = [torch.empty_like(tensor) for tensor in self.tensors]
        elif not changes:
            self._before = None
        for buffer, live in zip(self.tensors, self._live(), strict=True):
            if live is None:
                buffer.zero_()
            else:
                buffer.copy_(live)
        for before, buffer in zip(self._before or (), self.tensors, strict=False):
            before.copy_(buffer)

    @torch.no_grad()
    def apply(self) -> None:
        """Moves the state by what the buffers hold now, as the delta rule says. A statistic that the optimizer has not
        made yet stays so."""
        for index, (average, live) in enumerate(zip(self.tensors, self._live(), strict=True)):
            if live is None:
                continue
            if self._before is None:
                live.copy_(average)
            else:
                live.copy_(_moved(live, average, self._before[index]))

    def _live(self) -> Iterator[torch.Tensor | None]:
        """The tensors of the state at this moment, in order: optimizers replace their statistics when they load."""
        yield from self._parameters
        for parameter in self._trained:
            made = self._optimizer.state.get(parameter, {})
            yield from (made.get(name) for name in self._names)
        yield from self._extra


def _moved(live: torch.Tensor, average: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Where the state stands as it was loaded, or was not finite when it was, that is the average itself."""
    present = live.cpu()
    exact = torch.float32 if present.dtype.itemsize < 4 else present.dtype
    change = average.to(exact) - before.to(exact)
    moved = (present.to(exact) + change).to(present.dtype)
    return torch.where((present == before) | ~before.isfinite(), average, moved)
