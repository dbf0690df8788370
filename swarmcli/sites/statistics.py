"""The statistics of a site's optimizer as rank 0 gives them to the swarm: piece by piece, and never all in one memory.

donating       every rank copies its share at one moment (a pin); whoever downloads reads pieces of the copies
downloading    the state comes in a file; every rank gets its pieces of it, and only when all have theirs do all switch
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from swarmcli.compression import TensorDescriptor
from swarmcli.compression.base import read_numbers, tensor_memory
from swarmcli.errors import SiteError
from swarmcli.network import wire
from swarmcli.optim.state.statistics import read_place
from swarmcli.sharding.zero.state import copy_settings
from swarmcli.sites.commands import LeaderCommands
from swarmcli.sites.links import receive_bytes, receive_numbers, send_numbers
from swarmcli.sites.share import (
    DropStaged,
    FillStaged,
    InstallStaged,
    Outline,
    PinStatistics,
    ReadPinned,
    ReleaseStatistics,
    ShareOfStatistics,
    Span,
    StageStatistics,
)
from swarmcli.sites.site import Site
from swarmcli.state.distant import PIECE, AnyTensor, DistantTensor, fill, pieces
from swarmcli.state.snapshot import TensorEntry
from swarmcli.state.unnamed_file import usual_directory

logger = logging.getLogger(__name__)

_COPYING_SECONDS = 300.0  # for a pin


class SiteStatistics:
    """At rank 0: the statistics of all ranks. Implements `swarmcli.optim.state.statistics.Statistics`.

    A rank that is gone, or silent for the site's timeout, makes every method, and every read of what was captured,
    raise SiteError.
    """

    waits = True

    def __init__(
        self, site: Site, commands: LeaderCommands, share: ShareOfStatistics, spool: Path | None = None
    ) -> None:
        """`share` is rank 0's own; `spool`: see Statistics, None for the system's directory of temporary files."""
        self.spool: Path | None = spool or usual_directory()
        self._site, self._commands, self._share = site, commands, share
        self._numbers = count()
        self._releases = Releases(commands)

    def close(self) -> None:
        """The other ranks let go of what has been released. Idempotent."""
        self._releases.close()

    def capture(self) -> tuple[dict[str, AnyTensor], dict[str, Any]]:
        pin = self._releases.watched(Pin(next(self._numbers)))
        outlines = self._commands.run(PinStatistics(pin.number), self._receive_outlines)
        own, numbers = self._share.live()
        tensors: dict[str, AnyTensor] = dict(own)
        for outline in outlines:
            numbers |= outline.numbers
            for entry in outline.entries:
                tensors[entry.name] = self._captured(pin, entry, outline.small.get(entry.name))
        return _by_index(tensors), _by_index(numbers)

    @contextmanager
    def staged(
        self, tensors: Mapping[str, AnyTensor], numbers: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> Iterator[Callable[[], None]]:
        entries = [TensorEntry.of(place, tensor) for place, tensor in tensors.items()]
        self._commands.run(StageStatistics(entries, dict(numbers)), partial(self._share.stage, entries, numbers))
        try:
            self._fill_shares(tensors)
            yield partial(self._install, groups)
        finally:
            if self._commands.failed is None:
                self._commands.run(DropStaged(), self._share.drop)  # what has not been installed

    def _install(self, groups: Sequence[dict[str, Any]]) -> None:
        self._commands.run(InstallStaged(), self._share.install)
        copy_settings(groups, self._share.zero.param_groups)

    def read_pinned(self, pin: int, place: str, begin: int, end: int) -> memoryview:
        """Bytes of the copy that a rank made for a pin. Raises SiteError."""
        content = torch.empty(end - begin, dtype=torch.uint8)
        for first, last in pieces(end - begin):
            span = (place, begin + first, begin + last)
            part = content[first:last]
            self._commands.run(ReadPinned(pin, span), partial(self._receive, [(span, part)]))
        return tensor_memory(content)

    def _captured(self, pin: Pin, entry: TensorEntry, content: bytes | None) -> AnyTensor:
        descriptor = entry.header.descriptor()
        if content is None:
            return PinnedStatistic(descriptor, entry.name, pin, self)
        return read_numbers(bytearray(content), descriptor.dtype, descriptor.numel).reshape(descriptor.shape)

    def _fill_shares(self, tensors: Mapping[str, AnyTensor]) -> None:
        for place, tensor in tensors.items():
            if self._is_own(place):
                fill(self._share.staged(place), tensor)
        for batch in _batches(self._pieces_elsewhere(tensors)):
            self._commands.run(FillStaged([span for span, _ in batch]), partial(self._send, batch))

    def _pieces_elsewhere(self, tensors: Mapping[str, AnyTensor]) -> Iterator[tuple[Span, torch.Tensor]]:
        """What goes to other ranks, in pieces that are read when they are asked for."""
        for place, tensor in tensors.items():
            if self._is_own(place):
                continue
            for begin, end in pieces(tensor.nbytes):
                part = (
                    tensor.read(begin, end) if isinstance(tensor, DistantTensor) else tensor_memory(tensor)[begin:end]
                )
                yield (place, begin, end), read_numbers(part, torch.uint8, end - begin)

    def _is_own(self, place: str) -> bool:
        return self._share.owner_of(place) == self._site.rank

    def _receive_outlines(self) -> list[Outline]:
        """Not before every rank has copied its share, however large that is."""
        patience = max(self._site.timeout, timedelta(seconds=_COPYING_SECONDS))
        data = [receive_bytes(self._site.commands, rank, patience) for rank in self._site.others]
        return [wire.decode(Outline, each) for each in data]

    def _receive(self, batch: Sequence[tuple[Span, torch.Tensor]]) -> None:
        for (place, _, _), content in batch:
            owner = self._share.owner_of(place)
            receive_numbers(self._site.commands, [content], owner, self._site.timeout)

    def _send(self, batch: Sequence[tuple[Span, torch.Tensor]]) -> None:
        for (place, _, _), content in batch:
            send_numbers(self._site.commands, [content], self._share.owner_of(place))


class PinnedStatistic(DistantTensor):
    """A statistic of another rank as it was when it was pinned."""

    def __init__(self, descriptor: TensorDescriptor, place: str, pin: Pin, statistics: SiteStatistics) -> None:
        super().__init__(descriptor)
        self._place, self._pin, self._statistics = place, pin, statistics

    def read(self, begin: int, end: int) -> memoryview:
        return self._statistics.read_pinned(self._pin.number, self._place, begin, end)


@dataclass(frozen=True, eq=False)
class Pin:
    """Stands for the copies that the ranks made at one moment: they keep them for as long as it lives."""

    number: int


class Releases:
    """Tells the ranks which copies nobody needs any more, in a thread: pins may end in any, the event loop's too."""

    def __init__(self, commands: LeaderCommands) -> None:
        self._commands = commands
        self._waiting: SimpleQueue[int | None] = SimpleQueue()  # its `put` is safe in finalizers
        self._thread: threading.Thread | None = None

    def watched(self, pin: Pin) -> Pin:
        """The ranks will be told when it is gone."""
        weakref.finalize(pin, self._waiting.put, pin.number).atexit = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swarm-releases", daemon=True)
            self._thread.start()
        return pin

    def close(self) -> None:
        """Returns when the ranks have been told of all that are gone. Idempotent."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (number := self._waiting.get()) is not None:
            try:
                self._commands.run(ReleaseStatistics(number))
            except SiteError as error:
                logger.debug("pin %d was not released: %s", number, error)


def _by_index(values: dict[str, Any]) -> dict[str, Any]:
    """As an optimizer that is not shared out has them in its state: so both describe equal states equally."""
    return dict(sorted(values.items(), key=lambda item: read_place(item[0])[0]))


def _batches(items: Iterator[Any] | Sequence[Any]) -> Iterator[list[tuple[Span, torch.Tensor]]]:
    """As many as fit into one command: together not more than a piece of the largest size."""
    batch: list[tuple[Span, torch.Tensor]] = []
    filled = 0
    for span, content in items:
        if batch and filled + content.nbytes > PIECE:
            yield batch
            batch, filled = [], 0
        batch.append((span, content))
        filled += content.nbytes
    if batch:
        yield batch
