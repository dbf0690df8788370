"""Copies averages from a member that has them to one that lacks them, and checks them against their digests."""

from __future__ import annotations

from swarmcli.averaging.audit.signed import digest_of
from swarmcli.averaging.certificate import DIGEST_BYTES
from swarmcli.averaging.config import SILENCE_TRIPS, AllreduceOptions
from swarmcli.averaging.round.buffers import Average, Holdings, Results, root_of_tables
from swarmcli.averaging.round.mates import GroupMates
from swarmcli.averaging.round.messages import CopyHeader, CopyHeld, CopyRequest, CopyTable, at_most
from swarmcli.averaging.round.plan import Part
from swarmcli.averaging.round.sender import check_senders
from swarmcli.averaging.round.signed import SignedLists
from swarmcli.compression import NoCompression, TensorHeader, TensorMessage
from swarmcli.compression.base import all_finite
from swarmcli.concurrency import forgetful, on_executor, unless_silent
from swarmcli.errors import CallRefused, CompressionError, NetworkError, ProtocolViolation
from swarmcli.events import PeerRefused
from swarmcli.network import Stream

SILENCE = 5.0  # seconds without a byte from one holder, after which another is asked while it still has the averages


async def give_copies(holdings: Holdings, request: CopyRequest, stream: Stream) -> None:
    """Answers a request with the table of all averages, then with those that the other member lacks, or has another of.
    Raises CallRefused if not all of them are here."""
    if request.plan != holdings.plan.fingerprint:
        raise CallRefused("plan", "tensors, shares or options differ from the group's")
    if holdings.digest is None or holdings.signed is None or holdings.results is None:
        raise CallRefused("not here", "not all of these averages are here")
    await stream.send(CopyTable(holdings.signed.told), holdings.tables)
    _, held = await stream.receive(CopyHeld, at_most(len(holdings.plan.parts) * DIGEST_BYTES))
    for part in holdings.unlike(bytes(held)):
        average = holdings.get(part)
        if average is None:
            raise CallRefused("not here", "the averages are not here any more")
        content = NoCompression().compress(holdings.results.part(part)).payload if average.senders else ()
        await stream.send(CopyHeader(average.senders, average.weights), content)


class Copier:
    """Fetches averages of one exchange from other members into the results of this one. Nothing else writes there
    meanwhile."""

    def __init__(
        self, mates: GroupMates, holdings: Holdings, results: Results, signed: SignedLists, options: AllreduceOptions
    ) -> None:
        self._mates, self._holdings, self._results, self._options = mates, holdings, results, options
        self._signed = signed
        self._senders = frozenset(range(len(mates))) - mates.group.auxiliaries

    @forgetful
    async def copy(self, source: int, *, last: bool) -> str:
        """Takes from another member the averages that this one lacks, or has others of, if their reducers have signed
        them. `last`: nobody else has them, so this peer waits longer: what the member before had sent may still hold up
        its line. Returns "" or why that failed."""
        peer, patience = self._mates.peer(source), self._options.for_reducer
        if not last:
            patience = min(patience, SILENCE + SILENCE_TRIPS * self._mates.slowest_round_trip)
        request = CopyRequest(self._mates.group.group_id, self._holdings.plan.fingerprint)
        method = self._mates.method("copy")
        try:
            async with self._mates.endpoint.stream(peer, method, request, timeout=patience) as stream:
                digests, inputs = await self._receive_tables(stream, patience)
                lacking = self._holdings.unlike(digests)
                await stream.send(CopyHeld(), self._holdings.tables[:1])
                self._holdings.drop(part.index for part in lacking)
                for part in lacking:
                    self._holdings.put([await self._receive(stream, patience, part, digests, inputs)])
        except ProtocolViolation as error:
            self._mates.endpoint.events.emit(PeerRefused(peer.text, error.reason, "averages"))
            return f"{peer.short} gave a false copy: {error.reason}"
        except NetworkError as error:
            return f"{peer.short} gave no copy: {error}"
        except TimeoutError:
            return f"{peer.short} gave no copy: it fell silent"
        return ""

    async def _receive_tables(self, stream: Stream, patience: float) -> tuple[bytes, bytes]:
        """Returns the digests of all parts, and the hashes of their inputs. Raises ProtocolViolation unless their
        reducers have signed them."""
        plan = self._holdings.plan
        whole = len(plan.parts) * DIGEST_BYTES
        async with unless_silent(stream, patience):
            table, payload = await stream.receive(CopyTable, at_most(2 * whole))
        digests, inputs = bytes(payload[:whole]), bytes(payload[whole:])
        for reducer, parts in plan.by_reducer.items():
            signed = table.signed.get(reducer)
            root = root_of_tables(parts, digests, inputs)
            if signed is None or not self._signed.take(reducer, signed, root):
                raise ProtocolViolation(f"averages that {self._mates.peer(reducer).short} has not signed")
        return digests, inputs

    async def _receive(self, stream: Stream, patience: float, part: Part, digests: bytes, inputs: bytes) -> Average:
        async with unless_silent(stream, patience):
            header, payload = await stream.receive(CopyHeader, at_most(part.descriptor.nbytes))
        check_senders(header.senders, header.weights, self._senders)
        place = slice(part.index * DIGEST_BYTES, (part.index + 1) * DIGEST_BYTES)
        await on_executor(part.descriptor.nbytes, self._take, part, header, payload, digests[place])
        return Average(part, header.senders, header.weights, None, digests[place], inputs[place])

    def _take(self, part: Part, header: CopyHeader, payload: memoryview, digest: bytes) -> None:
        """Writes a copy into the results. Raises ProtocolViolation unless it has this digest and finite values."""
        message = None
        if header.senders:
            message = TensorMessage(TensorHeader.of("none", self._results.part(part)), (payload,))
        if digest_of(part.index, header.senders, header.weights, message) != digest:
            raise ProtocolViolation(f"part {part.index} does not have the content that its digest names")
        if message is not None:
            try:
                values = NoCompression().extract(message)
            except CompressionError as error:  # its reducer may have signed for anything
                raise ProtocolViolation(f"part {part.index} is no tensor: {error}") from error
            if not all_finite(values):
                raise ProtocolViolation(f"part {part.index} holds NaN or infinity")
            self._results.part(part).copy_(values)
