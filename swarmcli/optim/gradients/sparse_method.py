"""SparseLoCo's error feedback: what a peer's sparse message leaves out stays with the peer for the next round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from swarmcli.compression import CompressionBase, CompressionInfo, NoCompression, PerTensorCompression, TopK
from swarmcli.optim.gradients.accumulator import GradientMethod


class SparseMethod(GradientMethod):
    """Sends the largest numbers and keeps the rest (arXiv 2508.15706, algorithm 1).

        E' = β E + n G          residual of this peer, in sums over samples; G its mean over n samples
        T  = Q(top-k(E' / n))   what it sends, with weight n: the values that all others decode, to the bit
        E  ← E' − n T           if the round counted it; otherwise E stays

    Everyone steps with Σ n T / Σ n; the sums are over all members, even those that did not send a coordinate. E changes
    only in `finish`, so a round that fails loses nothing. `finish` reads G once more: until then the accumulator's
    means must stay as they were loaded. float64 gradients travel whole.
    """

    def __init__(
        self, means: Sequence[torch.Tensor], codec: TopK, decay: float, beside: Sequence[torch.Tensor] = ()
    ) -> None:
        """`decay`: β, the share of the residual that goes into the next round."""
        super().__init__(means, beside)
        self._codec, self._decay = codec, decay
        self._messages = [torch.zeros_like(mean) for mean in self.averaged]
        self._residuals = [torch.zeros_like(mean) for mean in self.averaged]
        self.tensors = [*self._messages, *beside]
        self._aside: list[torch.Tensor] | None = None  # the residuals if a round has counted what was set aside

    @property
    def compression(self) -> CompressionBase:
        """The codecs of `tensors`, by index; those beside gradients are not sparse."""
        return PerTensorCompression([self._codec] * len(self._messages) + [NoCompression()] * len(self.beside))

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """The residuals, in the shapes of the parameters."""
        return {f"residual{index}": each for index, each in enumerate(self._residuals)}

    @torch.no_grad()
    def load(self, weight: float) -> None:
        super().load(weight)
        for message, mean, residual in zip(self._messages, self.averaged, self._residuals, strict=True):
            if self.samples:
                message.copy_(self._sent(self._with(mean, residual)))
            else:
                message.zero_()

    @torch.no_grad()
    def finish(self, samples: float, counted: bool) -> None:
        for message, mean, residual in zip(self._messages, self.averaged, self._residuals, strict=True):
            if counted and self.samples:
                residual.copy_(self._left(mean, residual))
            mean.copy_(message)
        self.samples = 0.0

    @torch.no_grad()
    def set_aside(self) -> None:
        if self.samples:
            self._aside = [self._left(*pair) for pair in zip(self.averaged, self._residuals, strict=True)]
            self.samples = 0.0

    @torch.no_grad()
    def forget_aside(self, *, counted: bool) -> None:
        if counted and self._aside is not None:
            for residual, left in zip(self._residuals, self._aside, strict=True):
                residual.copy_(left)
        self._aside = None

    def _with(self, mean: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.mul(self._decay).add_(mean * self.samples)

    def _left(self, mean: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The residual after a round that has counted what was loaded."""
        due = self._with(mean, residual)
        return due.sub_(self._sent(due), alpha=self.samples)

    def _sent(self, due: torch.Tensor) -> torch.Tensor:
        """The values that the others decode, per sample."""
        values = due / self.samples
        codec = self._codec.codec_for(CompressionInfo.of(values))
        return codec.extract(codec.compress(values)).clone()
