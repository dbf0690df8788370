"""Averages that one member has and another one lacks, copied between them and checked against their digests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from swarmcli.averaging.audit.signed import digest_of
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.consensus.messages import HoldingsAnswer, HoldingsQuestion
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.round.buffers import Average, Holdings, Results, digest_at, result_digest
from swarmcli.averaging.round.messages import CopyHeader, CopyRequest
from swarmcli.averaging.round.plan import Part
from swarmcli.averaging.round.sender import check_senders
from swarmcli.compression import NoCompression, TensorHeader, TensorMessage
from swarmcli.compression.base import all_finite
from swarmcli.errors import CallRefused, NetworkError, ProtocolViolation
from swarmcli.events import PeerRefused
from swarmcli.memory import unwritten
from swarmcli.network import Stream
from swarmcli.tasks import forgetful, on_executor, unless_silent


async def give_copies(holdings: Holdings, request: CopyRequest, stream: Stream) -> None:
    """Answers a request with the averages of the parts that it names. Raises CallRefused if one is missing."""
    if request.plan != holdings.plan.fingerprint:
        raise CallRefused("plan", "tensors, shares or options differ from the group's")
    if list(request.parts) != sorted(set(request.parts)) or not all(map(holdings.get, request.parts)):
        raise CallRefused("not here", "not all of these averages are here")
    for index in request.parts:
        average = holdings.get(index)
        if average is None:  # gone meanwhile: this member copies it itself
            raise CallRefused("not here", "not all of these averages are here")
        content = holdings.content(index)
        header = CopyHeader(average.part.reducer, average.senders, average.weights, average.digest)
        await stream.send(header, () if content is None else content.payload)


class Copier:
    """Fetches averages from other members into the results of this one. Nothing else writes there meanwhile."""

    def __init__(
        self, mates: GroupCalls, holdings: Holdings, results: Results, options: AllreduceOptions, failed: set[int]
    ) -> None:
        """`failed`: members that gave no copy of an average that they claim, or a false one. This member does not ask
        them again in this round; grows."""
        self._mates, self._holdings, self._results, self._options = mates, holdings, results, options
        self._failed = failed
        self._senders = frozenset(range(len(mates))) - mates.group.auxiliaries

    async def obtain(self, digest: bytes) -> bool:
        """Copies missing averages of the result with this digest. False: no member in reach gave it."""
        holdings, mates = self._holdings, self._mates
        async with asyncio.TaskGroup() as tasks:  # of all at the same time: one that is frozen takes long to answer
            others = [member for member in mates.others if member not in self._failed]
            asked = {tasks.create_task(self._ask(member)): member for member in others}
            waiting = set(asked)
            while waiting and holdings.digest != digest:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda each: asked[each]):
                    if result_digest(task.result()) == digest and holdings.digest != digest:
                        await self.copy(task.result(), [asked[task]])
            for task in waiting:
                task.cancel()
        return holdings.digest == digest

    async def copy(self, target: bytes, sources: Iterable[int]) -> dict[int, str]:
        """Copies the averages that `target` names, as far as they are not here and the sources hold them, one source
        after the other. Returns why some of these gave less than they said."""
        holdings, failures = self._holdings, dict[int, str]()
        holdings.drop(part.index for part in holdings.lacking(target))  # copies are written to their memory
        for source in sources:
            lacking = holdings.lacking(target)
            if not lacking:
                break
            if source in self._failed:
                continue
            held, got = await self._ask(source), list[Average]()
            wanted = {part: digest for part, digest in lacking.items() if digest_at(held, part.index) == digest}
            if wanted and (failure := await self.fetch(source, wanted, got)):
                failures[source] = failure
                self._failed.add(source)
            holdings.put(got)
        return failures

    async def _ask(self, member: int) -> bytes:
        """The digests of the averages that a member holds; none of an auxiliary, which holds no result."""
        question = HoldingsQuestion(self._mates.group.group_id, self._holdings.plan.fingerprint)
        try:
            at_once = self._mates.options.at_once
            answer = await self._mates.ask(member, "holdings", question, HoldingsAnswer, at_once)
        except NetworkError:
            return b""
        if self._holdings.signed is not None:
            self._holdings.signed.compare(answer.signed)  # of the same try, as the group id says
        return answer.digests

    @forgetful
    async def fetch(self, source: int, wanted: Mapping[Part, bytes], got: list[Average]) -> str:
        """Fetches parts, each with the digest that it must have, into `got`. Returns "" or why it ended before."""
        peer = self._mates.peer(source)
        request = CopyRequest(
            self._mates.group.group_id, self._holdings.plan.fingerprint, tuple(part.index for part in wanted)
        )
        method, patience = self._mates.method("copy"), self._options.for_reducer
        try:
            async with self._mates.endpoint.stream(peer, method, request, timeout=patience) as stream:
                for part, digest in wanted.items():
                    got.append(await self._receive(stream, part, digest))
        except ProtocolViolation as error:
            self._mates.endpoint.events.emit(PeerRefused(peer.text, error.reason, "averages"))
            return f"{peer.short} gave a false copy: {error.reason}"
        except NetworkError as error:
            return f"{peer.short} gave no copy: {error}"
        except TimeoutError:
            return f"{peer.short} gave no copy: it fell silent"
        return ""

    async def _receive(self, stream: Stream, part: Part, digest: bytes) -> Average:
        def into(header: CopyHeader, size: int) -> memoryview:
            if not header.senders or size != part.descriptor.nbytes:
                raise ProtocolViolation(f"the copy of part {part.index} has {size} bytes")
            return unwritten(size)

        async with unless_silent(stream, self._options.for_reducer):
            header, payload = await stream.receive(CopyHeader, into)
        check_senders(header.senders, header.weights, self._senders)
        if header.reducer >= len(self._mates):
            raise ProtocolViolation("an average by nobody in this group")
        if header.digest != digest or bool(header.senders) != bool(payload.nbytes):
            raise ProtocolViolation(f"part {part.index} is another one than was promised")
        await on_executor(part.descriptor.nbytes, self._take, part, header, payload)
        return Average(replace(part, reducer=header.reducer), header.senders, header.weights, None, digest)

    def _take(self, part: Part, header: CopyHeader, payload: memoryview) -> None:
        """Writes a copy into the results, if it has the right digest. Raises ProtocolViolation otherwise."""
        message = None
        if header.senders:
            message = TensorMessage(TensorHeader.of("none", self._results.part(part)), (payload,))
        if digest_of(part.index, header.senders, header.weights, message) != header.digest:
            raise ProtocolViolation(f"part {part.index} does not have the content that its digest names")
        if message is not None:
            values = NoCompression().extract(message)
            if not all_finite(values):
                raise ProtocolViolation(f"part {part.index} holds NaN or infinity")
            self._results.part(part).copy_(values)
