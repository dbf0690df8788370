"""The averages of the last committed rounds, for peers that missed them: kept in memory, given out like a state, and
fetched from others. The memory is that of the round itself, which nobody writes once it has ended."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Annotated

import msgspec
import torch

from swarmcli.averaging.audit.signed import digest_of
from swarmcli.averaging.certificate import DIGEST_BYTES, RoundCertificate
from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.averaging.round.buffers import Average, Inputs, contributions_to, digest_at, result_digest
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.averaging.round.result import RoundResult
from swarmcli.compression import NoCompression
from swarmcli.compression.base import tensor_memory
from swarmcli.concurrency import OFFLOAD_FROM, on_executor
from swarmcli.errors import StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.network import Endpoint, PeerID, wire
from swarmcli.network.bounds import MAX_TAG_BYTES
from swarmcli.network.loop_thread import offload
from swarmcli.state.donor import StateDonor
from swarmcli.state.download import DownloadProgress, download_state
from swarmcli.state.snapshot import ChunkLayout, Snapshot, StateOutline
from swarmcli.state.unnamed_file import UnnamedFile, usual_directory

KEPT_ROUNDS = 2  # whoever missed more downloads the state, which is hardly larger
KEPT_BYTES = 64 << 20  # of averages that may stay; beyond that the oldest go when the next round needs memory …
KEPT_SECONDS = 30.0  # … or after this: whoever froze or was cut off for a moment has asked by then
MOST_FETCHES = 8  # at a time: they are small beside downloads of a state

Senders = tuple[int, ...]
Weights = tuple[float, ...]


class RoundRecord(msgspec.Struct, frozen=True):
    """The facts about the averages of a round, as metadata of a state.

    weights      of the contributors, one for each
    samples      of the contributors, as they were counted; (): equal to the weights
    runs         (parts, senders, weights): so many parts in a row hold the tensors of these members
    digests      32 bytes for each part, as its reducer sent it
    certificate  proves that the group has committed the round
    shares       of the group's work, which tell where parts end; () if the digests are not of these averages
    """

    group_id: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
    tag: Annotated[bytes, msgspec.Meta(max_length=MAX_TAG_BYTES)]
    digest: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
    contributors: tuple[PeerID, ...]
    weights: Weights
    runs: tuple[tuple[int, Senders, Weights], ...]
    digests: bytes
    certificate: RoundCertificate | None = None
    shares: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    samples: Weights = ()

    def __post_init__(self) -> None:
        if len(self.contributors) != len(self.weights) or not self.contributors:
            raise ValueError(f"{len(self.weights)} weights for {len(self.contributors)} contributors")
        if self.samples and len(self.samples) != len(self.weights):
            raise ValueError(f"samples of {len(self.samples)} for {len(self.contributors)} contributors")
        if not all(MIN_WEIGHT <= weight <= MAX_WEIGHT for weight in self.weights + self.samples):
            raise ValueError("a contributor with an impossible weight")
        if any(n < 1 or len(weights) not in (len(senders), 2 * len(senders)) for n, senders, weights in self.runs):
            raise ValueError("parts with unlike numbers of senders and weights")
        if sum(count for count, _, _ in self.runs) * DIGEST_BYTES != len(self.digests):
            raise ValueError("digests of other parts than the named ones")
        if self.shares and not (all(share >= 0 for share in self.shares) and 0 < sum(self.shares) < math.inf):
            raise ValueError("impossible shares of the work")

    @property
    def total_samples(self) -> int:
        return round(math.fsum(self.samples_of))

    @property
    def samples_of(self) -> Weights:
        """Each contributor's samples, as they were counted."""
        return self.samples or self.weights

    @classmethod
    def of(cls, tag: bytes, result: RoundResult) -> RoundRecord:
        digests = b"".join(average.digest for average in result.parts)
        peers, weights = tuple(result.weights), tuple(result.weights.values())
        runs, samples = tuple(_runs(result.parts)), tuple(result.samples.values())
        told = () if samples == weights else samples
        facts = result_digest(digests), peers, weights, runs, digests, result.certificate, result.shares, told
        return cls(result.round_id, tag, *facts)

    @classmethod
    def read(cls, metadata: object) -> RoundRecord:
        """Reads a record from the metadata of a state. Raises ValueError."""
        if not isinstance(metadata, bytes):
            raise ValueError("averages without their record")
        try:
            return wire.decode(cls, metadata)
        except msgspec.DecodeError as error:
            raise ValueError(f"unreadable record of a round: {error}") from None


@dataclass(frozen=True)
class KeptRound:
    """A committed round. `averages` have the shapes of the averaged tensors; nobody writes to them."""

    record: RoundRecord
    averages: list[torch.Tensor]

    @property
    def group_id(self) -> bytes:
        return self.record.group_id

    @property
    def nbytes(self) -> int:
        return sum(average.nbytes for average in self.averages)

    def snapshot(self, version: bytes) -> Snapshot:
        """The round as others download it."""
        return Snapshot(version, wire.encode(self.record), _named(self.averages))

    async def on_disk(self) -> KeptRound:
        """Returns the same round with its averages in a file without a name, not in memory. Raises OSError."""
        layout, file = ChunkLayout.of(_named(self.averages)), UnnamedFile(usual_directory())

        def write() -> None:
            file.resize(layout.nbytes)
            for offset, tensor in zip(layout.offsets, self.averages, strict=False):
                file.write(offset, tensor_memory(tensor))

        try:
            await offload(write)
            return KeptRound(self.record, list(layout.tensors(file.map(layout.nbytes)).values()))
        finally:
            file.close()  # the mapping outlives that

    def prove(self, layout: Layout, part_size_bytes: int) -> None:
        """Raises ValueError unless the group that the record names has signed for these averages. `layout`: of the
        tensors; `part_size_bytes`: the run's."""
        record, certificate = self.record, self.record.certificate
        if certificate is None or len(record.shares) != len(certificate.peers):
            raise ValueError("averages without the signatures of their group")
        signed_for = certificate.group_id, certificate.tag, certificate.digest
        if signed_for != (record.group_id, record.tag, record.digest) or not certificate.verify():
            raise ValueError("averages for which their group has not signed")
        plan, peers = Plan.make(layout, record.shares, part_size_bytes), dict(enumerate(certificate.peers))
        runs = chain.from_iterable(repeat((senders, weights), count) for count, senders, weights in record.runs)
        if len(record.digests) != len(plan.parts) * DIGEST_BYTES:
            raise ValueError(f"{len(record.digests) // DIGEST_BYTES} parts instead of {len(plan.parts)}")
        values, averages = Inputs(self.averages), []
        for part, (senders, weights) in zip(plan.parts, runs, strict=True):
            message = NoCompression().compress(values.part(part)) if senders else None
            average = Average(part, senders, weights, None, digest_of(part.index, senders, weights, message))
            if average.digest != digest_at(record.digests, part):
                raise ValueError(f"part {part.index} is not what the digest of the round names")
            averages.append(average)
        counted = {peers.get(sender): each for sender, each in contributions_to(averages).items()}
        numbers = zip(record.weights, record.samples_of, strict=True)
        named: dict[PeerID | None, tuple[float, float]] = dict(zip(record.contributors, numbers, strict=True))
        # Samples may count for less than was told: they are bounded by what the group's list says.
        if counted.keys() != named.keys() or any(
            named[peer][0] != each.weight or named[peer][1] > each.samples for peer, each in counted.items()
        ):
            raise ValueError("other weights or more samples than in its parts, for which its group has signed")


class RoundArchive:
    """The last rounds that one averager committed."""

    def __init__(self, endpoint: Endpoint, prefix: str) -> None:
        self._endpoint, self._prefix = endpoint, replay_prefix(prefix)
        self._donor = StateDonor(endpoint, self._prefix, self._provide, max_downloads=MOST_FETCHES)
        self._rounds: deque[KeptRound] = deque(maxlen=KEPT_ROUNDS)  # oldest first
        self._expiry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to serve. Raises ValueError if the endpoint has an archive of this prefix already."""
        self._donor.start()

    def close(self) -> None:
        """Serves no more, and lets go of the rounds. Idempotent."""
        self._donor.close()
        self._rounds.clear()
        self.make_room()

    def keep(self, tag: bytes, result: RoundResult) -> None:
        """Keeps a committed round that has averages, in the memory where they lie."""
        self._rounds.append(KeptRound(RoundRecord.of(tag, result), list(result.averages)))
        self._expiry = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.make_room)

    def make_room(self) -> None:
        """Drops the oldest rounds until KEPT_BYTES hold the rest. A peer that is downloading one still gets all of
        it."""
        if self._expiry is not None:
            self._expiry.cancel()
        while sum(kept.nbytes for kept in self._rounds) > KEPT_BYTES:
            self._rounds.popleft()

    async def _provide(self, version: bytes) -> Snapshot | None:
        for kept in reversed(self._rounds):
            if version == version_of_tag(kept.record.tag):
                return kept.snapshot(version)
        return None

    async def fetch(
        self,
        donors: Sequence[PeerID],
        layout: Layout,
        *,
        tag: bytes,
        part_size_bytes: int | None = None,
        timeout: float,
        progress: DownloadProgress | None = None,
    ) -> KeptRound:
        """Fetches the newest round of `tag` from the donors, the first ones first.

        `layout`: of the tensors here. `part_size_bytes`: the run's; if given, the round's group must have signed for
        the averages. `progress` is kept up to date. Raises StateDownloadError if no donor has the round, or after
        `timeout` seconds in which nothing of it came.
        """
        left, attempts = list(donors), dict[str, str]()
        while True:
            state = await download_state(
                self._endpoint,
                self._prefix,
                left,
                version=version_of_tag(tag),
                timeout=timeout,
                max_bytes=2 * layout.nbytes + (1 << 20),
                check=lambda outline: _check_outline(outline, layout, tag),
                progress=progress,
            )
            kept = KeptRound(RoundRecord.read(state.metadata), list(state.tensors.values()))
            try:
                if part_size_bytes is not None:  # never on the loop: signatures take long too
                    await on_executor(max(layout.nbytes, OFFLOAD_FROM), kept.prove, layout, part_size_bytes)
                return kept
            except ValueError as error:
                for donor in state.donors:
                    attempts[donor.text] = str(error)
                    self._endpoint.events.emit(PeerRefused(donor.text, str(error), "averages"))
                left = [donor for donor in left if donor not in state.donors]
                if not left:
                    raise StateDownloadError(f"the averages that came are false: {error}", attempts) from None


def replay_prefix(prefix: str) -> str:
    """The prefix under which an averager shares its kept rounds."""
    return f"{prefix}.replays"


def version_of_tag(tag: bytes) -> bytes:
    """The version under which peers ask for the newest round of a tag."""
    return b"tag " + hashlib.sha256(tag).digest()


def _named(averages: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(index): average for index, average in enumerate(averages)}


def _check_outline(outline: StateOutline, layout: Layout, tag: bytes) -> None:
    """Checks an outline before memory is allocated. Raises ValueError."""
    record = RoundRecord.read(outline.metadata)
    if tuple(outline.descriptors.values()) != layout.descriptors:
        raise ValueError("averages of other shapes or types than the tensors here")
    if record.tag != tag:
        raise ValueError("the averages of another round than the one that was asked for")
    if result_digest(record.digests) != record.digest:
        raise ValueError("parts that do not belong to the digest of the round")


def _runs(parts: Sequence[Average]) -> Iterator[tuple[int, Senders, Weights]]:
    begin = 0
    for end in range(1, len(parts) + 1):
        first = parts[begin]
        if end == len(parts) or (parts[end].senders, parts[end].weights) != (first.senders, first.weights):
            yield end - begin, first.senders, first.weights
            begin = end
