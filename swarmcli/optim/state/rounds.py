"""Rounds over training states, volume by volume, beside those of the gradients and under a prefix of their own.

With a lossy codec the members of a group first see whether all hold the same reference, the last committed average, and
then send differences from it; if one does not, as a newcomer, all send values without the codec.

    values      x ──────────────── no codec ──▶ the average ──▶ reference, named by its round
    differences x − reference ──── codec ─────▶ D ───────────▶ reference + D: the average, and the next reference

A codec's error is relative to what it is given. An epoch changes parameters by 1e-4 of their size, say, and float16
keeps 5e-4 of it: sent as values, what was learned would be rounded away. Differences lose 5e-4 of what was learned.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from swarmcli.averaging import AveragerCore, AveragingStage, RoundRequest
from swarmcli.averaging.control import encode_gathered
from swarmcli.averaging.group import Group
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.errors import SwarmError
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.optim.state.volumes import VOLUME_BYTES, Slot, Volume, cut
from swarmcli.tasks import on_executor

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig, RoundResult, StepControl
    from swarmcli.dht import DHTNode

Fill: TypeAlias = Callable[[], Awaitable[None]]
Result: TypeAlias = "RoundResult | str"  # why there is none


@dataclass(frozen=True, slots=True)
class StateRoundOptions:
    """How long a round of states waits, and when it is tried again. Times are seconds.

    Mates of other groups end the epoch within moments, or are at another one and look for this peer in turn: a peer
    that waited for them as long as for others would have no time left for its own epochs.
    """

    longest_wait: float = 5.0  # for mates who have just ended the same epoch, and copy their states now
    to_begin: float = 10.0  # beyond that, in which the group of those who came may begin
    wait_for_other_groups: float = 3.0
    to_begin_without: float = 1.0  # beyond that
    pause: float = 0.1  # between two tries
    shortest_try: float = 0.1
    behind: float = 2.0  # so many times as long as the last volume took, a mate may need more for it than this peer


def state_config(run_id: str, gradients: AveragerConfig, compression: CompressionBase) -> AveragerConfig:
    """Configures the states' averager: like that of the gradients, with its own codec, and all peers in one group."""
    matchmaking = replace(
        gradients.matchmaking,
        target_group_size=None,  # what several groups part, this unites
        min_matchmaking_time=min(StateRounds.options.longest_wait, gradients.matchmaking.min_matchmaking_time),
    )
    allreduce = replace(gradients.allreduce, compression=compression, tensor_infos=None)
    return replace(gradients, prefix=f"{run_id}_state", allreduce=allreduce, matchmaking=matchmaking)


@dataclass(frozen=True, slots=True)
class Occasion:
    """After which epoch states are averaged, and with whom: with `mates` and with others of this tag; None: the members
    of the last round are expected. All volumes have one occasion, so none holds anything of another lineage."""

    tag: bytes
    epoch: int
    weight: float
    mates: tuple[PeerID, ...] | None
    several: bool = False  # some of the mates ended the epoch in other groups

    def tag_of(self, number: int) -> bytes:
        """The tag of one volume. Only peers that are at the same one form groups."""
        if number == 0:
            return self.tag
        return hashlib.sha256(b"swarm volume" + number.to_bytes(4) + self.tag).digest()


@dataclass(slots=True)
class VolumeReference:
    """The last average of a volume. All peers that hold one of the same round hold the same bits."""

    round_id: bytes
    tensors: list[torch.Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, round_id: bytes, averages: Sequence[torch.Tensor]) -> VolumeReference:
        return cls(round_id, [average.clone() for average in averages])

    @torch.no_grad()
    def subtract_from(self, values: Sequence[torch.Tensor]) -> None:
        """Values become differences, in place."""
        for value, reference in zip(values, self.tensors, strict=True):
            value.sub_(reference)

    @torch.no_grad()
    def move(self, round_id: bytes, differences: Sequence[torch.Tensor]) -> None:
        """Becomes the average of this round, whose averaged differences become that average, in place.

        One correctly rounded addition per element, of bits that all members have: they end with the same ones.
        """
        for difference, reference in zip(differences, self.tensors, strict=True):
            reference.add_(difference)
            difference.copy_(reference)
        self.round_id = round_id


class StateRounds:
    """One round at a time, over memory that belongs to whoever asks for it."""

    options = StateRoundOptions()

    def __init__(
        self,
        node: DHTNode,
        config: AveragerConfig,
        slots: Iterable[Slot],
        terms: Mapping[str, str] | None = None,
        *,
        volume_bytes: int = VOLUME_BYTES,
    ) -> None:
        """`volume_bytes` must be alike at all peers, as the slots are. Raises OptimizerError for statistics that cannot
        be averaged."""
        self.slots = tuple(slots)
        self._extents = cut([slot.descriptor for slot in self.slots], volume_bytes)
        first, *_ = self.volumes()
        config = replace(config, allreduce=replace(config.allreduce, tensor_infos=first.infos))
        self.averager = AveragerCore(first.outline, node, config)
        self._wait = config.matchmaking.min_matchmaking_time
        self._terms = dict(terms or {})
        self._took = 0.0  # seconds, the last all-reduce
        self._codec = config.allreduce.compression
        self._references: dict[int, VolumeReference] = {}  # of volumes, by number; none for a codec that loses nothing

    def volumes(self) -> list[Volume]:
        """All of them, in the order of their rounds, with nothing copied yet."""
        return [Volume(self.slots, extents) for extents in self._extents]

    async def average(self, occasion: Occasion, number: int, volume: Volume, fill: Fill | None = None) -> str:
        """One round for this volume: why it gave no average, empty if it did, and the buffers hold it.

        `fill` fills the buffers, None: this peer is an auxiliary and has none. A round that is cancelled here is left;
        the others go on.
        """
        averager = self.averager
        wait = min(self._wait, self.options.wait_for_other_groups) if occasion.several else self._wait
        if number > 0:
            wait += self.options.behind * self._took  # for mates that get what the last round gave more slowly
        elif occasion.mates is not None:
            averager.finder.expect(occasion.mates)
        request = RoundRequest(
            tag=occasion.tag_of(number),
            weight=occasion.weight,
            timeout=wait + (self.options.to_begin_without if occasion.several else self.options.to_begin),
            lookout=wait,
            epoch=occasion.epoch,
            terms=self._terms,
        )
        exact = isinstance(self._codec, NoCompression)
        way = self._average_values(request, volume, fill) if exact else self._try_all(request, number, volume, fill)
        try:
            result = await way
        finally:  # the averager lets go of the volume's memory, also when this is cancelled
            await averager.take_up(volume.outline, volume.infos, self._codec)
        if isinstance(result, str):
            return result
        self._took = result.seconds.get(AveragingStage.RUNNING_ALLREDUCE.value, 0.0)
        # Auxiliaries do not learn of everybody's weight.
        return "" if result.total_weight > 0 or averager.config.auxiliary else "nobody in the group had samples"

    async def _average_values(self, request: RoundRequest, volume: Volume, fill: Fill | None) -> Result:
        if fill is not None:
            await fill()
        await self.averager.take_up(volume.outline if fill is None else volume.tensors, volume.infos)
        return await _ended(self.averager.begin_round(request))

    async def _try_all(self, request: RoundRequest, number: int, volume: Volume, fill: Fill | None) -> Result:
        """Tries again after a failure while there is time to find a group, for each group has its own way."""
        assert request.timeout is not None
        deadline = loop_time() + request.timeout
        while True:
            result = await self._negotiate(request, number, volume, fill)
            left = deadline - loop_time() - self.options.pause
            if not isinstance(result, str) or left < self.options.shortest_try:
                return result
            await asyncio.sleep(self.options.pause)
            request = replace(request, timeout=left)

    async def _negotiate(self, request: RoundRequest, number: int, volume: Volume, fill: Fill | None) -> Result:
        """One group: once it stands its members know each other's references, and only then choose what they send."""
        own, averager = self._references.get(number), self.averager
        name = None if own is None else own.round_id
        await averager.take_up(volume.outline, volume.infos, self._codec)
        control = averager.begin_round(replace(request, gather=name, require_trigger=True, allow_retries=False))
        try:
            begun = asyncio.Event()  # or it has ended without a group
            control.begun.add_done_callback(lambda _: begun.set())
            await begun.wait()
            common = b"" if control.group is None else _common_reference(control.group)
            if common and fill is not None and common != encode_gathered(name):
                return "its leader altered what this peer told of its reference"
            if not control.begun.cancelled():
                await self._hand_over(volume, fill, own if common else None, self._codec if common else NoCompression())
                control.allow_allreduce()
            result = await _ended(control)
            if fill is not None and not isinstance(result, str) and result.total_weight > 0:
                await self._remember(result.group.group_id, number, volume, by_differences=bool(common))
            return result
        finally:
            control.cancel()  # without effect on a round that has ended

    async def _hand_over(
        self, volume: Volume, fill: Fill | None, reference: VolumeReference | None, codec: CompressionBase
    ) -> None:
        if fill is None:
            await self.averager.take_up(volume.outline, volume.infos, codec)
            return
        await fill()
        if reference is not None:
            await on_executor(volume.nbytes, reference.subtract_from, volume.tensors)
        await self.averager.take_up(volume.tensors, volume.infos, codec)

    async def _remember(self, round_id: bytes, number: int, volume: Volume, *, by_differences: bool) -> None:
        """The average is the reference of the next round. What the others' is if this peer missed a round it says by
        the round's id: then the next one has values."""
        if by_differences:  # in place: all of these members held the same reference, and go on to the same next one
            await on_executor(volume.nbytes, self._references[number].move, round_id, volume.tensors)
        else:
            self._references.pop(number, None)  # before there is another: memory for one copy of a state is enough
            self._references[number] = await on_executor(volume.nbytes, VolumeReference.of, round_id, volume.tensors)


def _common_reference(group: Group) -> bytes:
    """The name of the reference that all members with a state told, encoded; empty if they told several or none.

    It is part of the group's id, so everyone comes to the same answer.
    """
    told = {member.gathered for member in group.members if not member.auxiliary}
    return told.pop() if len(told) == 1 else b""


async def _ended(control: StepControl) -> Result:
    """How the round ended: its result, or why there is none."""
    try:
        await control.ended()
    except asyncio.CancelledError:
        control.cancel()
        raise
    if control.cancelled():
        return "it was left"
    try:
        return control.result(timeout=0)
    except SwarmError as error:
        return str(error)
