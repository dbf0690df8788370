"""One rank's share of the optimizer's statistics, and what rank 0 may ask of it: copies, pieces, a new share.

Commands are carried out one at a time and steps are commands too, so nothing here changes while it is being read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from swarmcli.compression.base import tensor_memory
from swarmcli.network import wire
from swarmcli.optim.state.statistics import by_place, read_place
from swarmcli.sharding.transfer import as_bytes
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from swarmcli.sites.commands import Command
from swarmcli.sites.links import receive_numbers, send_bytes, send_numbers
from swarmcli.sites.site import Site
from swarmcli.state.snapshot import TensorEntry, copied

SMALL = 1 << 10  # bytes; statistics up to this size, such as counts of steps, come with the outline
Span = tuple[str, int, int]  # a place, where the piece begins, where it ends


class PinStatistics(Command, frozen=True):
    """Every rank copies its share and sends its outline."""

    pin: int


class ReleaseStatistics(Command, frozen=True):
    """The copies of a pin are not needed any more."""

    pin: int


class ReadPinned(Command, frozen=True):
    """The owner sends bytes of a copy."""

    pin: int
    span: Span


class StageStatistics(Command, frozen=True):
    """Every rank makes room for another share beside its own."""

    entries: list[TensorEntry]
    numbers: dict[str, Any]


class FillStaged(Command, frozen=True):
    """The owners take bytes of what they have made room for."""

    spans: list[Span]


class InstallStaged(Command, frozen=True):
    """That share takes the place of every rank's own."""


class DropStaged(Command, frozen=True):
    """It does not."""


class Outline(msgspec.Struct, frozen=True):
    """What there is in a share, by place. `small`: the contents of tensors of at most SMALL bytes."""

    entries: tuple[TensorEntry, ...]
    small: dict[str, bytes]
    numbers: dict[str, Any]


class ShareOfStatistics:
    """At every rank. `handlers` are for the Followers; rank 0 calls the other methods for its own share."""

    def __init__(self, site: Site, zero: ZeroRedundancyOptimizer) -> None:
        self.zero = zero
        self._site = site
        self._pins: dict[int, dict[str, torch.Tensor]] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, Any] = {}

    @property
    def handlers(self) -> Mapping[type[Command], Callable[[Any], None]]:
        return {
            PinStatistics: self._pin,
            ReleaseStatistics: self._release,
            ReadPinned: self._read_pinned,
            StageStatistics: lambda command: self.stage(command.entries, command.numbers),
            FillStaged: self._fill,
            InstallStaged: lambda command: self.install(),
            DropStaged: lambda command: self.drop(),
        }

    def owner_of(self, place: str) -> int:
        return self.zero.owner_of(read_place(place)[0])

    def live(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's statistics by place: tensors, and plain values."""
        return by_place(self.zero.local_state())

    def stage(self, entries: Sequence[TensorEntry], numbers: Mapping[str, Any]) -> None:
        """Makes room for what of these is this rank's."""
        self._staged = {
            entry.name: torch.empty(entry.shape, dtype=entry.header.descriptor().dtype)
            for entry in entries
            if self._is_own(entry.name)
        }
        self._numbers = {place: value for place, value in numbers.items() if self._is_own(place)}

    def staged(self, place: str) -> torch.Tensor:
        return self._staged[place]

    def install(self) -> None:
        """What is staged takes the place of this rank's statistics, in the types that a state dict would get."""
        state: dict[int, dict[str, Any]] = {}
        while self._staged:
            place = next(iter(self._staged))
            index, name = read_place(place)
            state.setdefault(index, {})[name] = _fitted(name, self._staged.pop(place), self.zero.parameters[index])
        for place, value in self._numbers.items():
            index, name = read_place(place)
            state.setdefault(index, {})[name] = value
        self.drop()
        self.zero.install_state(state, copy=False)

    def drop(self) -> None:
        """Forgets what is staged."""
        self._staged, self._numbers = {}, {}

    # Commands

    def _pin(self, command: PinStatistics) -> None:
        tensors, numbers = self.live()
        self._pins[command.pin] = copied({place: each for place, each in tensors.items() if each.nbytes > SMALL})
        entries = tuple(TensorEntry.of(place, tensor) for place, tensor in tensors.items())
        small = {place: bytes(tensor_memory(each)) for place, each in tensors.items() if each.nbytes <= SMALL}
        send_bytes(self._site.commands, wire.encode(Outline(entries, small, numbers)), 0)

    def _release(self, command: ReleaseStatistics) -> None:
        self._pins.pop(command.pin, None)

    def _read_pinned(self, command: ReadPinned) -> None:
        place, begin, end = command.span
        if self._is_own(place):
            send_numbers(self._site.commands, [as_bytes(self._pins[command.pin][place])[begin:end]], 0)

    def _fill(self, command: FillStaged) -> None:
        for place, begin, end in self._own_of(command.spans):
            receive_numbers(self._site.commands, [as_bytes(self._staged[place])[begin:end]], 0)

    def _own_of(self, spans: Sequence[Span]) -> list[Span]:
        return [span for span in spans if self._is_own(span[0])]

    def _is_own(self, place: str) -> bool:
        return self.owner_of(place) == self._site.rank


def _fitted(name: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In the type in which torch's load_state_dict would leave it."""
    return value.to(parameter.dtype) if name != "step" and parameter.is_floating_point() else value
