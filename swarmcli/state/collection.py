"""What the donors of one state have given, and whose hashes say what it is.

Donors hash their chunks as they are asked for, so nobody knows all hashes of a state when its download begins. One
donor is the *reference*: a chunk that another one gave counts if its hash is the reference's for that chunk. When the
reference is lost or found to lie, another donor takes its place, and of what has arrived everything stays that is
equal in its state too. So what comes out is one donor's state to the last bit, whoever sent the pieces.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from swarmcli.errors import NetworkError
from swarmcli.network import Endpoint, PeerID
from swarmcli.state.assembly import Assembly
from swarmcli.state.donor import MAX_DIGESTS_AT_ONCE, DigestAnswer, DigestQuestion, digest_method

_HASH = 32
_TIMEOUT = 20.0  # seconds for some hashes; a donor computes them at gigabytes a second


class Unequal(Exception):
    """The donor's state is another one than the one that is being put together."""


class Source(Protocol):
    """Someone who knows the digests of a state."""

    peer: PeerID

    async def digest(self, chunk: int) -> bytes:
        """Raises NetworkError."""


class DonorDigests:
    """The digests of one donor's snapshot, asked for when they are needed."""

    def __init__(self, endpoint: Endpoint, prefix: str, peer: PeerID, pin: bytes, chunks: int) -> None:
        self.peer = peer
        self._endpoint, self._method, self._pin, self._chunks = endpoint, digest_method(prefix), pin, chunks
        self._known: dict[int, bytes] = {}
        self._asking = asyncio.Lock()

    def said(self, chunk: int, digest: bytes) -> None:
        """It named this digest with a chunk. Raises ValueError if it has named another one before."""
        if self._known.setdefault(chunk, digest) != digest:
            raise ValueError(f"it names two hashes for chunk {chunk} of one state")

    async def digest(self, chunk: int) -> bytes:
        async with self._asking:
            if chunk not in self._known:
                await self._ask(chunk - chunk % MAX_DIGESTS_AT_ONCE)
        return self._known[chunk]

    async def _ask(self, first: int) -> None:
        count = min(MAX_DIGESTS_AT_ONCE, self._chunks - first)
        question = DigestQuestion(self._pin, first, count)
        answer = await self._endpoint.call(self.peer, self._method, question, DigestAnswer, timeout=_TIMEOUT)
        if len(answer.digests) != count * _HASH:
            raise ValueError(f"it names {len(answer.digests) // _HASH} hashes for {count} chunks")
        for place in range(count):
            self.said(first + place, answer.digests[place * _HASH : (place + 1) * _HASH])


class Collection:
    """One state, from all donors whose manifests are equal."""

    def __init__(self, manifest: bytes, assembly: Assembly) -> None:
        self.manifest, self.assembly = manifest, assembly
        self.received = 0  # bytes
        self._givers: dict[int, PeerID] = {}  # of the chunks that have arrived
        self._reference: Source | None = None
        self._changing = asyncio.Lock()

    @property
    def donors(self) -> tuple[PeerID, ...]:
        """Who gave something of what has arrived."""
        return tuple(dict.fromkeys(self._givers[chunk] for chunk in self.assembly.arrived))

    def forsake(self, source: Source) -> None:
        """The source cannot be asked or believed any more. Without effect unless it is the reference."""
        if source is self._reference:
            self._reference = None

    async def accept(self, source: Source, chunk: int, digest: bytes) -> None:
        """A chunk of this source has arrived, with this digest. Raises Unequal if it is not the reference's."""
        while True:
            reference = await self._choose(source)
            try:
                named = await reference.digest(chunk)
            except (NetworkError, ValueError):
                self.forsake(reference)
                if reference is source:
                    raise
                continue
            if reference is not self._reference:
                continue
            if named != digest:
                raise Unequal
            self._givers[chunk] = source.peer
            self.assembly.add(chunk, digest)
            return

    async def _choose(self, source: Source) -> Source:
        """The reference; if there is none, this source becomes it, and what is unlike in its state is put back."""
        async with self._changing:
            if self._reference is None:
                arrived = dict(self.assembly.arrived)
                unlike = [chunk for chunk, digest in arrived.items() if await source.digest(chunk) != digest]
                self.assembly.put_back(unlike)
                self._reference = source
            return self._reference
