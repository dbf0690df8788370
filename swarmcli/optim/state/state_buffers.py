"""One volume of what peers average of their training states, and how the average comes back.

    state ──fill──▶ buffers ── a round ──▶ the average ──apply──▶ state += average - state as it was copied

That is the delta rule (`delta_rule.py`): what a peer learned while the round was under way is kept. Where nothing was
learned meanwhile the average is assigned, bit for bit, so that peers end with equal states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch

from swarmcli.averaging.allreduce.lending import fresh_memory
from swarmcli.compression import CompressionInfo, TensorDescriptor, TensorRole
from swarmcli.optim.state.delta_rule import moved
from swarmcli.optim.state.slots import Slot
from swarmcli.optim.state.statistics import put
from swarmcli.optim.state.volumes import Extent, whole

_ALIGNMENT = 64  # bytes


class StateBuffers:
    """What of some slots is averaged in one round.

    nbytes   of all buffers
    infos    of each: what codecs may choose by
    outline  tensors like the buffers that hold nothing, for those who only need shapes and types
    tensors  the buffers, in host memory that nobody has touched before `fill`, and that goes with this object
    """

    def __init__(self, slots: Iterable[Slot], extents: Sequence[Extent] | None = None) -> None:
        """`extents` of the slots, None: all of them. OptimizerError: statistics that the optimizer cannot have."""
        slots = tuple(slots)
        self._extents = whole([slot.descriptor for slot in slots]) if extents is None else tuple(extents)
        self._slots = [slots[extent.index] for extent in self._extents]
        self.infos = tuple(map(_info, self._slots, self._extents))
        self._offsets = _offsets([info.descriptor for info in self.infos])
        self.nbytes = self._offsets[-1]
        self._before: list[torch.Tensor] | None = None  # what was pinned, unless nothing can change meanwhile
        for slot in self._slots:
            slot.find()

    @property
    def outline(self) -> list[torch.Tensor]:
        return [torch.empty(info.descriptor.shape, dtype=info.descriptor.dtype, device="meta") for info in self.infos]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return self._in_memory()

    @torch.no_grad()
    def pin(self) -> None:
        """Copies the state as it is: `fill` and `apply` go by that from now on."""
        self._before = self._before or self._in_memory()
        for index, before in enumerate(self._before):
            self._copy(index, before)

    @torch.no_grad()
    def fill(self) -> None:
        """The buffers hold what was pinned, or else the state as it is."""
        for index, buffer in enumerate(self.tensors):
            if self._before is None:
                self._copy(index, buffer)
            else:
                buffer.copy_(self._before[index])

    @torch.no_grad()
    def apply(self) -> None:
        """Moves the state by what the buffers hold now, as the delta rule says."""
        for index, average in enumerate(self.tensors):
            live = self._live(index)
            if live is None:
                continue
            if self._before is not None:
                before = self._before[index]
                squares = self._slots[index].squares or self._is_variance(index, live, before)
                average = moved(live, average, before, squares=squares)
            self._write(index, average)

    def _is_variance(self, index: int, live: torch.Tensor, before: torch.Tensor) -> bool:
        """Batch norm's running variances have no name here. For means that happen to be positive the rule does no
        harm."""
        return self._slots[index].role is TensorRole.UNSPECIFIED and bool((before > 0).all() and (live > 0).all())

    def _copy(self, index: int, target: torch.Tensor) -> None:
        live = self._live(index)
        target.zero_() if live is None else target.copy_(live)

    def _live(self, index: int) -> torch.Tensor | None:
        """A view of what is averaged, but for tensors that are cut and not contiguous."""
        tensor, extent = self._slots[index].find(), self._extents[index]
        if tensor is None or extent.numel == tensor.numel():
            return tensor
        return tensor.detach().reshape(-1)[extent.begin : extent.end]

    def _write(self, index: int, values: torch.Tensor) -> None:
        tensor, extent = self._slots[index].find(), self._extents[index]
        assert tensor is not None
        if extent.numel == tensor.numel():
            tensor.copy_(values)
        else:
            put(tensor, extent.begin, values)

    def _in_memory(self) -> list[torch.Tensor]:
        # In one piece, which the system takes back whole: pieces of the heap would stay with the process.
        memory = fresh_memory(self.nbytes)
        return [
            memory[offset : offset + info.descriptor.nbytes].view(info.descriptor.dtype).view(info.descriptor.shape)
            for offset, info in zip(self._offsets, self.infos, strict=False)
        ]


def _info(slot: Slot, extent: Extent) -> CompressionInfo:
    form = slot.descriptor
    if extent.numel != form.numel:
        form = TensorDescriptor((extent.numel,), form.dtype)
    return CompressionInfo(form, extent.index, slot.role)


def _offsets(forms: Iterable[TensorDescriptor]) -> list[int]:
    """Where each begins if they lie one behind the other, and where the last one ends, in bytes."""
    offsets = [0]
    for form in forms:
        offsets.append(offsets[-1] + -(-form.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets
