"""The statistics of a site's optimizer: every rank keeps its share; rank 0 exchanges them with the swarm and the disk.

out    (donated, saved)       every rank sends its share, and rank 0 writes it into an unnamed file
in     (downloaded, loaded)   rank 0 sends every rank its share; only when all have theirs do all switch

Shares travel one after the other, in pieces, and are never together in one memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from swarmcli.compression.base import read_numbers, tensor_memory
from swarmcli.optim.state.statistics import by_place, read_place
from swarmcli.sharding import transfer
from swarmcli.sharding.transfer import Run, as_bytes, runs_of
from swarmcli.sharding.zero.state import copy_settings
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from swarmcli.sites.commands import Command, Handlers, LeaderCommands
from swarmcli.sites.links import receive_message, receive_tensors, send_message, send_tensors
from swarmcli.sites.site import Site
from swarmcli.state.assembly import FileTensor
from swarmcli.state.distant import PIECE, AnyTensor, fill
from swarmcli.state.snapshot import ChunkLayout, TensorEntry
from swarmcli.state.unnamed_file import UnnamedFile, usual_directory

T = TypeVar("T")


class SendStatistics(Command, frozen=True):
    """Every rank sends its share: its outline, then the tensors in that order."""


class StageStatistics(Command, frozen=True):
    """Every rank makes room for a new share beside its own, and takes its tensors in the order of the entries."""

    entries: list[TensorEntry]
    numbers: dict[str, Any]


class EndStaging(Command, frozen=True):
    """The new share replaces every rank's own (`install`), or is dropped."""

    install: bool


class Outline(msgspec.Struct, frozen=True):
    """The statistics in a share, by place."""

    entries: list[TensorEntry]
    numbers: dict[str, Any]


class ShareOfStatistics:
    """One rank's share. `handlers` are for the ranks but 0; rank 0 calls the other methods for its own share."""

    def __init__(self, site: Site, zero: ZeroRedundancyOptimizer) -> None:
        self.zero = zero
        self._site = site
        self._staged: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, Any] = {}

    @property
    def handlers(self) -> Handlers:
        return {
            SendStatistics: self._send,
            StageStatistics: self._receive,
            EndStaging: lambda command: self.end_staging(command.install),
        }

    def owned_by(self, rank: int, places: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `places` that belong to this rank, in their order."""
        return {place: each for place, each in places.items() if self.zero.owner_of(read_place(place)[0]) == rank}

    def outlined(self) -> tuple[Outline, list[torch.Tensor]]:
        """The outline of this rank's share, and its tensors in the order of the outline."""
        tensors, numbers = by_place(self.zero.local_state())
        return Outline([TensorEntry.of(place, each) for place, each in tensors.items()], numbers), [*tensors.values()]

    def stage(self, entries: Sequence[TensorEntry], numbers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Makes room for those of these that belong to this rank. Returns place → tensor, in their order."""
        own = self.owned_by(self._site.rank, {entry.name: entry for entry in entries})
        self._staged = {
            place: torch.empty(entry.shape, dtype=entry.header.descriptor().dtype) for place, entry in own.items()
        }
        self._numbers = self.owned_by(self._site.rank, numbers)
        return self._staged

    def end_staging(self, install: bool) -> None:
        """Replaces this rank's statistics by the staged ones, in the types that `load_state_dict` would give them; or
        drops these."""
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

    def _send(self, command: SendStatistics) -> None:
        outline, tensors = self.outlined()
        send_message(self._site.group, outline, 0)
        send_tensors(self._site.group, tensors, 0)

    def _receive(self, command: StageStatistics) -> None:
        room = [as_bytes(each) for each in self.stage(command.entries, command.numbers).values()]
        for runs in runs_of([each.nbytes for each in room], PIECE):
            receive_tensors(self._site.group, [room[run.tensor][run.start : run.stop] for run in runs], 0)


class SiteStatistics:
    """At rank 0: the statistics of all ranks. Implements `swarmcli.optim.state.statistics.Statistics`.

    Every method raises SiteError if a rank is gone, or silent for the site's timeout, and OSError if the disk of
    `spool` is full; then the site goes on.
    """

    waits = True

    def __init__(self, commands: LeaderCommands, share: ShareOfStatistics) -> None:
        """`share` is rank 0's own."""
        self.spool: Path | None = usual_directory()
        self._commands, self._share = commands, share

    def capture(self) -> tuple[dict[str, AnyTensor], dict[str, Any]]:
        file, layout, numbers = self._copied()
        places = zip(layout.entries, layout.offsets, strict=False)
        return {e.name: FileTensor(e.header.descriptor(), file, offset) for e, offset in places}, numbers

    def state(self) -> dict[int, dict[str, Any]]:
        """The same by parameter, as an optimizer has it; tensors are views of the file."""
        file, layout, numbers = self._copied()
        tensors = layout.tensors(file.map(layout.nbytes)) if layout.nbytes else {}
        state: dict[int, dict[str, Any]] = {}
        for place, value in [*tensors.items(), *numbers.items()]:
            index, name = read_place(place)
            state.setdefault(index, {})[name] = value
        return state

    @contextmanager
    def staged(
        self, tensors: Mapping[str, AnyTensor], numbers: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> Iterator[Callable[[], None]]:
        entries = [TensorEntry.of(place, tensor) for place, tensor in tensors.items()]
        unread: list[OSError] = []  # errors of the file; the ranks then get zeros for the rest, and drop everything

        def hand_out() -> None:
            for rank in self._commands.site.others:
                own = list(self._share.owned_by(rank, tensors).values())
                for runs in runs_of([tensor.nbytes for tensor in own], PIECE):
                    pieces = [_read(own[run.tensor], run, unread) for run in runs]
                    send_tensors(self._commands.site.group, pieces, rank)
            for place, room in self._share.stage(entries, numbers).items():
                try:
                    fill(room, tensors[place])
                except OSError as error:
                    unread.append(error)

        def end(install: bool) -> None:
            self._commands.run(EndStaging(install), lambda: self._share.end_staging(install))

        installed = False

        def install() -> None:
            nonlocal installed
            installed = True
            end(install=True)
            copy_settings(groups, self._share.zero.param_groups)

        self._commands.run(StageStatistics(entries, dict(numbers)), hand_out)
        try:
            if unread:
                raise unread[0]
            yield install
        finally:
            if not installed and self._commands.failed is None:
                end(install=False)

    def _copied(self) -> tuple[UnnamedFile, ChunkLayout, dict[str, Any]]:
        """The present statistics in an unnamed file, their layout there, and the numbers."""
        assert self.spool is not None
        file, unwritten = UnnamedFile(self.spool), list[OSError]()
        layout, numbers = self._commands.run(SendStatistics(), lambda: self._gather(file, unwritten))
        if unwritten:
            raise unwritten[0]
        return file, layout, numbers

    def _gather(self, file: UnnamedFile, unwritten: list[OSError]) -> tuple[ChunkLayout, dict[str, Any]]:
        """Takes the shares of all ranks, even what the disk has no room for, because their ranks are sending."""
        site, (own, tensors) = self._commands.site, self._share.outlined()
        others = [receive_message(Outline, site.group, rank, site.timeout) for rank in site.others]
        entries = _by_index({entry.name: entry for outline in [own, *others] for entry in outline.entries})
        layout = ChunkLayout(tuple(entries.values()), chunk_size=PIECE)
        places = dict(zip(entries, layout.offsets, strict=False))

        def write(place: int, tensor: torch.Tensor) -> None:
            try:
                if not unwritten:
                    file.write(place, tensor_memory(tensor))
            except OSError as error:
                unwritten.append(error)

        try:
            file.resize(layout.nbytes)
        except OSError as error:
            unwritten.append(error)
        for entry, tensor in zip(own.entries, tensors, strict=True):
            write(places[entry.name], tensor)
        room = torch.empty(transfer.PIECE, dtype=torch.uint8)
        for rank, outline in zip(site.others, others, strict=True):
            for runs in runs_of([entry.nbytes for entry in outline.entries], transfer.PIECE):
                lengths = [run.stop - run.start for run in runs]
                piece = room[: sum(lengths)]
                receive_tensors(site.group, [piece], rank, site.timeout)
                for run, part in zip(runs, piece.split(lengths), strict=True):
                    write(places[outline.entries[run.tensor].name] + run.start, part)
        numbers = {place: value for outline in [own, *others] for place, value in outline.numbers.items()}
        return layout, _by_index(numbers)


def _read(tensor: AnyTensor, run: Run, unread: list[OSError]) -> torch.Tensor:
    """A run of a tensor's bytes; zeros, once something could not be read."""
    if isinstance(tensor, torch.Tensor):
        return as_bytes(tensor)[run.start : run.stop]
    try:
        if not unread:
            return read_numbers(tensor.read(run.start, run.stop), torch.uint8, run.stop - run.start)
    except OSError as error:
        unread.append(error)
    return torch.zeros(run.stop - run.start, dtype=torch.uint8)


def _by_index(values: dict[str, T]) -> dict[str, T]:
    """In the order of an unsharded optimizer's state, so that equal states have equal descriptions."""
    return dict(sorted(values.items(), key=lambda item: read_place(item[0])[0]))
