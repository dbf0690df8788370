"""The parameters of each rank as views of a few long tensors, which are sent whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ParameterBuckets:
    """For each rank one long tensor per device and type that its parameters are views of.

    Parameters that are frozen when they are first laid out stay tensors of their own; they are sent too, because an
    optimizer steps whatever has a gradient. Later changes move nothing: if ranks froze different parameters, what they
    send and expect would not match otherwise.
    """

    def __init__(self) -> None:
        self._sent: list[list[torch.Tensor]] = []  # by rank
        self._views: dict[torch.Tensor, torch.Tensor] = {}
        self._apart: set[torch.Tensor] = set()

    def of_rank(self, rank: int) -> list[torch.Tensor]:
        """The tensors that hold this rank's parameters."""
        return self._sent[rank]

    def intact(self) -> bool:
        """Whether the parameters still are views of the buckets; `model.half()`, for one, gives them other memory."""
        return all(parameter.data_ptr() == view.data_ptr() for parameter, view in self._views.items())

    def lay_out(self, parameters_by_rank: Sequence[Sequence[torch.Tensor]]) -> None:
        """Moves the values into new buckets; parameters that are frozen and have never been in one stay apart."""
        everything = [parameter for parameters in parameters_by_rank for parameter in parameters]
        self._apart |= {each for each in everything if not each.requires_grad and each not in self._views}
        self._views = {}
        self._sent = [self._lay_out_rank(parameters) for parameters in parameters_by_rank]

    def _lay_out_rank(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter not in self._apart:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return [
            *(self._bucket(alike) for alike in kinds.values()),
            *(each for each in parameters if each in self._apart),
        ]

    def _bucket(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes = [parameter.numel() for parameter in parameters]
        bucket = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, bucket.split(sizes), strict=True):
            view = part.view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views[parameter] = view
        return bucket
