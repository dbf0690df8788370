"""The statistics of a site's optimizer: every rank keeps its share, and rank 0 gives them to the swarm.

donating       every rank copies its share at one moment (a pin); downloads read pieces of the copies
downloading    the state comes in a file; every rank gets its pieces of it, and only when all have theirs do all switch

They never come together in one memory. Commands are carried out one at a time and steps are commands too, so nothing
here changes while it is being read.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from swarmcli.compression import TensorDescriptor
from swarmcli.compression.base import read_numbers, tensor_memory
from swarmcli.optim.state.statistics import by_place, read_place
from swarmcli.sharding.transfer import Run, as_bytes, runs_of
from swarmcli.sharding.zero.state import copy_settings
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from swarmcli.sites.commands import Command, LeaderCommands
from swarmcli.sites.links import receive_message, receive_tensors, send_message, send_tensors
from swarmcli.sites.site import Site
from swarmcli.state.distant import PIECE, AnyTensor, DistantTensor, fill, pieces
from swarmcli.state.snapshot import TensorEntry, copied
from swarmcli.state.unnamed_file import usual_directory

_COPYING = timedelta(seconds=300)  # for a pin
Span = tuple[str, int, int]  # a place, where the piece begins, where it ends


class PinStatistics(Command, frozen=True):
    """Every rank lets go of the copies that nobody reads any more, copies its share, and sends its outline."""

    pin: int
    released: list[int]


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


class EndStaging(Command, frozen=True):
    """That share takes the place of every rank's own (`install`), or it does not."""

    install: bool


class Outline(msgspec.Struct, frozen=True):
    """The statistics in a share, by place. `small`: the contents of short tensors, such as counts of steps."""

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
            ReadPinned: self._read_pinned,
            StageStatistics: lambda command: self.stage(command.entries, command.numbers),
            FillStaged: self._fill,
            EndStaging: lambda command: self.end_staging(command.install),
        }

    def owner_of(self, place: str) -> int:
        return self.zero.owner_of(read_place(place)[0])

    def is_own(self, place: str) -> bool:
        return self.owner_of(place) == self._site.rank

    def live(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's statistics by place: tensors, and plain values."""
        return by_place(self.zero.local_state())

    def release(self, pins: Sequence[int]) -> None:
        for pin in pins:
            self._pins.pop(pin, None)

    def stage(self, entries: Sequence[TensorEntry], numbers: Mapping[str, Any]) -> None:
        """Makes room for what of these is this rank's."""
        self._staged = {
            entry.name: torch.empty(entry.shape, dtype=entry.header.descriptor().dtype)
            for entry in entries
            if self.is_own(entry.name)
        }
        self._numbers = {place: value for place, value in numbers.items() if self.is_own(place)}

    def staged(self, place: str) -> torch.Tensor:
        return self._staged[place]

    def end_staging(self, install: bool) -> None:
        """Has what is staged take the place of this rank's statistics, in the types that a state dict would get, or
        forgets it."""
        staged, numbers = self._staged, self._numbers
        self._staged, self._numbers = {}, {}
        if not install:
            return
        state: dict[int, dict[str, Any]] = {}
        while staged:  # one by one: a statistic of another type is not in memory twice for long
            place = next(iter(staged))
            index, name = read_place(place)
            value, parameter = staged.pop(place), self.zero.parameters[index]
            as_loaded = name != "step" and parameter.is_floating_point()  # torch's load_state_dict does the same
            state.setdefault(index, {})[name] = value.to(parameter.dtype) if as_loaded else value
        for place, value in numbers.items():
            index, name = read_place(place)
            state.setdefault(index, {})[name] = value
        self.zero.install_state(state, copy=False)

    # Commands

    def _pin(self, command: PinStatistics) -> None:
        self.release(command.released)
        tensors, numbers = self.live()
        short = {place: each for place, each in tensors.items() if each.nbytes <= 1 << 10}  # they come with the outline
        self._pins[command.pin] = copied({place: each for place, each in tensors.items() if place not in short})
        entries = tuple(TensorEntry.of(place, tensor) for place, tensor in tensors.items())
        small = {place: bytes(tensor_memory(each)) for place, each in short.items()}
        send_message(self._site.commands, Outline(entries, small, numbers), 0)

    def _read_pinned(self, command: ReadPinned) -> None:
        place, begin, end = command.span
        if self.is_own(place):
            send_tensors(self._site.commands, [as_bytes(self._pins[command.pin][place])[begin:end]], 0)

    def _fill(self, command: FillStaged) -> None:
        for place, begin, end in command.spans:
            if self.is_own(place):
                receive_tensors(self._site.commands, [as_bytes(self._staged[place])[begin:end]], 0)


class SiteStatistics:
    """At rank 0: the statistics of all ranks. Implements `swarmcli.optim.state.statistics.Statistics`.

    A rank that is gone, or silent for the site's timeout, makes every method, and every read of what was captured,
    raise SiteError.
    """

    waits = True

    def __init__(self, commands: LeaderCommands, share: ShareOfStatistics) -> None:
        """`share` is rank 0's own."""
        self.spool: Path | None = usual_directory()
        self._commands, self._share = commands, share
        self._numbers = count()
        # Pins end in any thread, the event loop's too, where nobody may wait for other ranks: so these learn of it
        # with the next step or pin.
        self._released: deque[int] = deque()

    def take_released(self) -> list[int]:
        """The pins that have ended since the last call. For the command that tells the ranks."""
        released = []
        with suppress(IndexError):  # steps and captures take from several threads
            while True:
                released.append(self._released.popleft())
        return released

    def capture(self) -> tuple[dict[str, AnyTensor], dict[str, Any]]:
        pin = StatisticsPin(next(self._numbers))
        weakref.finalize(pin, self._released.append, pin.number).atexit = False
        outlines = self._commands.run(PinStatistics(pin.number, self.take_released()), self._receive_outlines)
        own, numbers = self._share.live()
        tensors: dict[str, AnyTensor] = dict(own)
        for outline in outlines:
            numbers |= outline.numbers
            for entry in outline.entries:
                descriptor, content = entry.header.descriptor(), outline.small.get(entry.name)
                if content is None:
                    tensors[entry.name] = PinnedStatistic(descriptor, entry.name, pin, self)
                else:
                    values = read_numbers(bytearray(content), descriptor.dtype, descriptor.numel)
                    tensors[entry.name] = values.reshape(descriptor.shape)
        return _by_index(tensors), _by_index(numbers)

    @contextmanager
    def staged(
        self, tensors: Mapping[str, AnyTensor], numbers: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> Iterator[Callable[[], None]]:
        entries = [TensorEntry.of(place, tensor) for place, tensor in tensors.items()]
        self._commands.run(StageStatistics(entries, dict(numbers)), partial(self._share.stage, entries, numbers))

        def end(install: bool) -> None:
            self._commands.run(EndStaging(install), partial(self._share.end_staging, install))

        def install() -> None:
            end(install=True)
            copy_settings(groups, self._share.zero.param_groups)

        try:
            self._fill_shares(tensors)
            yield install
        finally:
            if self._commands.failed is None:
                end(install=False)  # forgets what has not been installed

    def read_pinned(self, pin: int, place: str, begin: int, end: int) -> memoryview:
        """Bytes of the copy that a rank made for a pin. Raises SiteError."""
        site, owner = self._commands.site, self._share.owner_of(place)
        content = torch.empty(end - begin, dtype=torch.uint8)
        for first, last in pieces(end - begin):
            receive = partial(receive_tensors, site.commands, [content[first:last]], owner, site.timeout)
            self._commands.run(ReadPinned(pin, (place, begin + first, begin + last)), receive)
        return tensor_memory(content)

    def _fill_shares(self, tensors: Mapping[str, AnyTensor]) -> None:
        """A piece at a time is read and in memory; short statistics share one."""
        elsewhere = []
        for place, tensor in tensors.items():
            if self._share.is_own(place):
                fill(self._share.staged(place), tensor)
            else:
                elsewhere.append((place, tensor))
        for runs in runs_of([tensor.nbytes for _, tensor in elsewhere], PIECE):
            batch = [(elsewhere[run.tensor][0], run, _read(elsewhere[run.tensor][1], run)) for run in runs]
            spans = [(place, run.start, run.stop) for place, run, _ in batch]
            self._commands.run(FillStaged(spans), partial(self._send, batch))

    def _send(self, batch: Sequence[tuple[str, Run, torch.Tensor]]) -> None:
        for place, _, content in batch:
            send_tensors(self._commands.site.commands, [content], self._share.owner_of(place))

    def _receive_outlines(self) -> list[Outline]:
        """Not before every rank has copied its share, however large that is."""
        site = self._commands.site
        patience = max(site.timeout, _COPYING)
        return [receive_message(Outline, site.commands, rank, patience) for rank in site.others]


class StatisticsPin:
    """Stands for the copies that the ranks made at one moment: they keep them for as long as it lives, and until the
    next command that tells them."""

    def __init__(self, number: int) -> None:
        self.number = number


class PinnedStatistic(DistantTensor):
    """A statistic of another rank as it was when it was pinned."""

    def __init__(
        self, descriptor: TensorDescriptor, place: str, pin: StatisticsPin, statistics: SiteStatistics
    ) -> None:
        super().__init__(descriptor)
        self._place, self._pin, self._statistics = place, pin, statistics

    def read(self, begin: int, end: int) -> memoryview:
        return self._statistics.read_pinned(self._pin.number, self._place, begin, end)


def _read(tensor: AnyTensor, run: Run) -> torch.Tensor:
    """A run of a tensor's bytes."""
    if isinstance(tensor, DistantTensor):
        part = tensor.read(run.start, run.stop)
    else:
        part = tensor_memory(tensor)[run.start : run.stop]
    return read_numbers(part, torch.uint8, run.stop - run.start)


def _by_index(values: dict[str, Any]) -> dict[str, Any]:
    """As an optimizer that is not shared out has them in its state: so both describe equal states equally."""
    return dict(sorted(values.items(), key=lambda item: read_place(item[0])[0]))
