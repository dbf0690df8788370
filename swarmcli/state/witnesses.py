"""Whether a downloaded state is the one that others hold under the same version.

Peers that hold a version tell its root on request: the hash of its manifest, which has the hashes of all chunks. A
downloader asks a few of them while it downloads, and drops the state if another root has more holders. Replicas on
unlike processors differ in their last bits: if every peer has another root, each has one holder, and the donor is
believed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Annotated

import msgspec

from swarmcli.errors import NetworkError
from swarmcli.network import Endpoint, PeerID
from swarmcli.state.snapshot import DIGEST_BYTES, MAX_VERSION

MOST_WITNESSES = 4  # that are asked: each hashes its state once
LEAST_WITNESSES = 3  # below that there is no majority against anybody
ROOT_TIMEOUT = 60.0  # seconds for a root: the witness may have to copy and hash its state
ROOT_PATIENCE = 5.0  # seconds for which a downloaded state waits for roots that have not come yet


class RootQuestion(msgspec.Struct, frozen=True):
    """Asks for the root of this version."""

    version: Annotated[bytes, msgspec.Meta(max_length=MAX_VERSION)]


class RootAnswer(msgspec.Struct, frozen=True):
    root: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


def root_method(prefix: str) -> str:
    """The name of the call."""
    return f"state.root.{prefix}"


class Witnesses:
    """Asks some peers for the root of a version, from now on and until `close`."""

    def __init__(self, endpoint: Endpoint, prefix: str, version: bytes, peers: Sequence[PeerID]) -> None:
        self._roots: dict[PeerID, bytes] = {}
        asked = list(peers)[:MOST_WITNESSES] if len(peers) >= LEAST_WITNESSES else []

        async def ask(peer: PeerID) -> None:
            try:
                question, method = RootQuestion(version), root_method(prefix)
                answer = await endpoint.call(peer, method, question, RootAnswer, timeout=ROOT_TIMEOUT)
                self._roots[peer] = answer.root
            except NetworkError:
                return  # the peer no longer has that version, or is busy: it does not count

        self._tasks = [asyncio.get_running_loop().create_task(ask(peer)) for peer in asked]

    async def roots(self) -> Mapping[PeerID, bytes]:
        """Peer → the root that it told, after ROOT_PATIENCE seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ROOT_PATIENCE)
        return self._roots

    async def close(self) -> None:
        """Asks no more; leaves no task."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def contradicted(
    root: bytes, donors: Collection[PeerID], roots: Mapping[PeerID, bytes], network: Callable[[PeerID], Hashable]
) -> bool:
    """Whether another root is held in more networks than this one, or in as many by more peers. Donors hold what they
    gave, whatever they say."""

    def weight(each: bytes) -> tuple[int, int]:
        holders = {peer for peer, said in roots.items() if said == each and (each == root or peer not in donors)}
        holders |= set(donors) if each == root else set()
        return len({network(peer) for peer in holders}), len(holders)

    return any(weight(each) > weight(root) for each in set(roots.values()))
