"""Averages that one member has and another one lacks, copied between them and checked against their digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarmcli.averaging.agreement.mates import Mates
from swarmcli.averaging.allreduce.holdings import Holdings
from swarmcli.averaging.allreduce.layout import Part
from swarmcli.averaging.allreduce.messages import CopyHeader, CopyRequest, Hash
from swarmcli.averaging.allreduce.patience import AllreduceOptions
from swarmcli.averaging.allreduce.reducer import Average, digest_of
from swarmcli.averaging.allreduce.sending import check_senders
from swarmcli.averaging.allreduce.vector import Results
from swarmcli.averaging.tasks import forgetful, on_executor, unless_silent
from swarmcli.compression import NoCompression, TensorHeader, TensorMessage
from swarmcli.compression.base import all_finite
from swarmcli.errors import CallRefused, NetworkError, ProtocolViolation
from swarmcli.events import PeerRefused
from swarmcli.network import Stream


async def give_copies(holdings: Holdings, request: CopyRequest, stream: Stream) -> None:
    """Answers a request with what is held of the parts that it names. Raises CallRefused if one is not."""
    if request.plan != holdings.plan.fingerprint:
        raise CallRefused("plan", "tensors, shares or options differ from the group's")
    if list(request.parts) != sorted(set(request.parts)) or not all(map(holdings.get, request.parts)):
        raise CallRefused("not here", "not all of these averages are here")
    for index in request.parts:
        average = holdings.get(index)
        if average is None:  # gone meanwhile: this member is being repaired itself
            raise CallRefused("not here", "not all of these averages are here")
        content = holdings.content(index)
        header = CopyHeader(average.part.reducer, average.senders, average.weights, average.digest)
        await stream.send(header, () if content is None else content.payload)


class Copier:
    """Fetches averages from other members into the results of this one."""

    def __init__(self, mates: Mates, plan: Hash, results: Results, options: AllreduceOptions) -> None:
        """`plan`: fingerprint of the plan of the round."""
        self._mates, self._fingerprint, self._results, self._options = mates, plan, results, options
        self._senders = frozenset(range(len(mates))) - mates.auxiliaries

    @forgetful
    async def fetch(self, source: int, wanted: Mapping[Part, bytes], got: list[Average]) -> str:
        """Fetches parts, each with the digest that it must have, into `got`. Returns "" or why it ended before."""
        peer = self._mates.peer(source)
        request = CopyRequest(self._mates.group.group_id, self._fingerprint, tuple(part.index for part in wanted))
        method, patience = self._mates.post.method("copy"), self._options.for_reducer
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
            return memoryview(bytearray(size))

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
        """Only what has the right digest gets into the results."""
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
