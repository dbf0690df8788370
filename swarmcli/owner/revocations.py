"""How the owner's revocations reach every member of a closed run, and what they do there.

A peer that learns of a revocation tells all peers that it is connected with, so one that reaches one member reaches all
connected ones after a few round trips. A peer that was away learns it with its next connection: two peers that connect
tell each other all they know. Only the owner's signature counts here, and a home keeps what its peer has learned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Annotated

import msgspec

from swarmcli.errors import CallRefused, NetworkError
from swarmcli.events import Event, MembershipEnded, PeerConnected, PeerRefused
from swarmcli.network import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.membership import Membership, Revocation
from swarmcli.network.task_owner import TaskOwner

logger = logging.getLogger(__name__)

METHOD = "run.revoked"
MOST_TOLD = 256  # revocations in one call: about 27 KiB
LOOK_SECONDS = 20.0  # seconds between two looks: has this peer's invitation ended, and who is still to be told


class Revoked(msgspec.Struct, frozen=True):
    """The owner's revocations that the sender knows."""

    revocations: Annotated[tuple[Revocation, ...], msgspec.Meta(max_length=MOST_TOLD)]


class Taken(msgspec.Struct, frozen=True):
    """The answer: revocations that the answerer knows besides."""

    known: Annotated[tuple[Revocation, ...], msgspec.Meta(max_length=MOST_TOLD)] = ()


class Revocations:
    """Tells and learns revocations at one endpoint, until `close`."""

    def __init__(self, endpoint: Endpoint, membership: Membership) -> None:
        self._endpoint = endpoint
        self._membership = membership
        self._ended = False  # whether the end of this peer's membership was told
        # peers that did not answer: one may have hung for a moment, and stay connected
        self._untold: set[PeerID] = set()
        self._tasks = TaskOwner()
        self._tasks.hear(self._endpoint.events, self._note)

    def start(self) -> None:
        self._endpoint.serve(METHOD, Revoked, self._answer)
        # This end tells the peers that were connected before: when they saw the connection, nothing here could answer.
        self._tell_all(self._endpoint.connected(), self._known)
        self._tasks.keep(self._endpoint.events, self._look_again_and_again)

    async def close(self) -> None:
        self._endpoint.withdraw(METHOD)
        await self._tasks.close()

    async def tell(self, peers: Iterable[PeerID], revocations: Iterable[Revocation]) -> list[PeerID]:
        """Tells these peers and waits until they know; returns those that do."""
        told = list(revocations)

        async def tell_one(peer: PeerID) -> PeerID | None:
            try:
                for first in range(0, max(1, len(told)), MOST_TOLD):
                    some = Revoked(tuple(told[first : first + MOST_TOLD]))
                    answer = await self._endpoint.call(peer, METHOD, some, Taken, timeout=5.0)
                    await self.take_up(answer.known, peer)
            except (NetworkError, ValueError) as error:
                logger.debug("%s was not told of revocations: %s", peer.short, error)
                self._untold.add(peer)
                return None
            return peer

        return [peer for peer in await asyncio.gather(*map(tell_one, peers)) if peer is not None]

    async def take_up(self, revocations: Iterable[Revocation], source: PeerID | None = None) -> int:
        """Learns new revocations, passes them on, and ends connections with revoked peers. Returns how many were new.
        Raises ValueError for one that the owner has not signed, after it has learned those before it."""
        new: list[Revocation] = []
        try:
            new += self._membership.learn(revocations)
        finally:
            if new:
                self._tasks.spawn(self._enforce(new, source))
        return len(new)

    # Inside

    @property
    def _known(self) -> list[Revocation]:
        return list(self._membership.remembered.revoked.values())

    async def _answer(self, peer: PeerID, told: Revoked) -> Taken:
        try:
            await self.take_up(told.revocations, peer)
        except ValueError as error:
            raise CallRefused("unsigned", str(error)) from None
        subjects = {each.subject for each in told.revocations}
        return Taken(tuple(each for each in self._known if each.subject not in subjects)[-MOST_TOLD:])

    async def _enforce(self, new: list[Revocation], source: PeerID | None) -> None:
        connected = self._endpoint.connected()
        leaving = [peer for peer in connected if self._membership.objection(peer)]
        self._tell_all([peer for peer in connected if peer not in (source, *leaving)], new)
        try:  # a revoked peer hears why, so that it ends instead of looking for the others
            async with asyncio.timeout(1.0):
                await self.tell(leaving, new)
        except TimeoutError:
            pass
        for peer, why in self._endpoint.expel().items():
            self._endpoint.events.emit(PeerRefused(peer.text, why, what="membership"))
        if self._membership.is_revoked:
            self._end("the owner of this run has revoked this peer's invitation")

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self._endpoint.events.emit(MembershipEnded(why))

    def _tell_all(self, peers: Iterable[PeerID], revocations: list[Revocation]) -> None:
        async def tell() -> None:
            await self.tell(peers, revocations)

        self._tasks.spawn(tell())

    def _note(self, event: Event) -> None:
        if isinstance(event, PeerConnected) and self._known:
            self._tell_all([PeerID.parse(event.peer)], self._known)

    async def _look_again_and_again(self) -> None:
        while True:
            untold, self._untold = self._untold, set()
            self._tell_all([peer for peer in untold if self._endpoint.is_connected(peer)], self._known)
            if self._membership.has_ended:
                self._end("this peer's invitation to this run has ended; ask the owner for another one")
            await asyncio.sleep(LOOK_SECONDS)
