"""The parameters of each rank as views of a few long tensors, which are sent whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ParameterBuckets:
    """For each rank one long tensor per device and type that its trainable parameters are views of.

    Frozen parameters stay tensors of their own; they are sent too, because an optimizer steps whatever has a gradient.
    All ranks must have the same parameters frozen, or what they send and expect does not match.
    """

    def __init__(self) -> None:
        self._sent: list[list[torch.Tensor]] = []  # by rank
        self._views: dict[torch.Tensor, torch.Tensor] = {}

    def of_rank(self, rank: int) -> list[torch.Tensor]:
        """The tensors that hold this rank's parameters."""
        return self._sent[rank]

    def intact(self) -> bool:
        """Whether the parameters still are views of the buckets; `model.half()`, for one, gives them other memory."""
        return all(parameter.data_ptr() == view.data_ptr() for parameter, view in self._views.items())

    def lay_out(self, parameters_by_rank: Sequence[Sequence[torch.Tensor]]) -> None:
        """Moves the values into new buckets; what is no longer trainable gets memory of its own again."""
        former, self._views = self._views, {}
        self._sent = [self._lay_out_rank(parameters, former) for parameters in parameters_by_rank]

    def _lay_out_rank(
        self, parameters: Sequence[torch.Tensor], former: dict[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        for parameter in frozen:
            if parameter in former:  # its old bucket would stay in memory for it
                parameter.data = parameter.detach().clone()
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return [*(self._bucket(alike) for alike in kinds.values()), *frozen]

    def _bucket(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes = [parameter.numel() for parameter in parameters]
        bucket = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, bucket.split(sizes), strict=True):
            view = part.view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views[parameter] = view
        return bucket
