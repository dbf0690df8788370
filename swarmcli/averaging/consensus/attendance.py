"""Who of a group has begun the round, as its leader sees it; and who need not be waited for, and why.

A member may still be computing when the others begin: it answers at once when it is asked, and is waited for. One
whose connection has ended, that has left, or that knows nothing of the round, is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from swarmcli.averaging.consensus.mates import AT_ONCE, Mates
from swarmcli.averaging.round.messages import MAX_WORDS, AbsenceNotice, Noted
from swarmcli.errors import CallRefused, NetworkError

_PAUSES = (1.0, 1.0, 2.0, 4.0, 8.0)  # seconds between two questions; the last one repeats
_LOOK_AGAIN = 0.25  # seconds, while there is no connection
_CONNECTING = 5.0  # seconds that a connection may still be on its way when the round begins
_DOUBTS = 2  # answers in a row after which a member that does not know of the round will not come to know of it


class Attendance:
    """Watches the members that have not begun. `lost` hears of each that need not be waited for, at most once."""

    def __init__(self, mates: Mates, lost: Callable[[int, str], None], patience: float) -> None:
        """`patience`: seconds for a member that answers to begin."""
        self.strangers: set[int] = set()  # members that have left, or know nothing of the round
        self.begun = {index: asyncio.Event() for index in mates.others}  # to be set from outside
        self._mates, self._lost, self._patience = mates, lost, patience

    async def run(self) -> None:
        """Ends when every other member has begun or is lost."""
        async with asyncio.TaskGroup() as tasks:
            for member in self.begun:
                tasks.create_task(self._watch(member))

    async def _watch(self, member: int) -> None:
        try:
            async with asyncio.timeout(self._patience):
                reason = await self._until_begun(member)
        except TimeoutError:
            reason = "it did not begin in time"
        if reason:
            self._lost(member, reason)

    async def _until_begun(self, member: int) -> str:
        """Returns "", or why it will not begin."""
        doubts, asked, gone, loop = 0, 0, "", asyncio.get_running_loop()
        connecting, connected = loop.time() + _CONNECTING, False
        while not self.begun[member].is_set():
            connected = connected or self._mates.is_connected(member)
            pause = _PAUSES[min(asked, len(_PAUSES) - 1)] if connected else _LOOK_AGAIN
            gone = await self._wait(member, pause) or gone
            if self.begun[member].is_set():
                break
            if not connected and self._mates.is_connected(member):
                continue
            answer = await self._mates.presence(member)
            standing = "" if answer is None else answer.standing
            asked += connected
            if standing == "over":
                self.strangers.add(member)
                return "it has left"
            if standing == "" and (connected or loop.time() > connecting):
                return f"it was gone before it began: {gone or 'no connection to it'}"
            doubts = doubts + 1 if standing == "unknown" else 0
            if doubts == _DOUBTS:
                self.strangers.add(member)
                return "it knows nothing of the round"
        return ""

    async def _wait(self, member: int, seconds: float) -> str:
        """Until it has begun, or its connection has ended (returns why), or the time has passed."""
        lost = self._mates.endpoint.lost(self._mates.peer(member))
        never = lost.done()  # there was no connection to lose
        async with asyncio.TaskGroup() as tasks:
            begins = tasks.create_task(self.begun[member].wait())
            either: list[asyncio.Future[Any]] = [begins] if never else [begins, lost]
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            reason = lost.result() if lost.done() and not never else ""
            begins.cancel()
            lost.cancel()
        return reason


class Crier:
    """Tells the others whom they need not wait for."""

    def __init__(self, mates: Mates) -> None:
        self._mates = mates
        self._news: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    def tell(self, member: int, reason: str) -> None:
        self._news.put_nowait((member, reason))

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                member, reason = await self._news.get()
                notice = AbsenceNotice(self._mates.group.group_id, member, reason[:MAX_WORDS])
                for other in self._mates.others:
                    if other != member:
                        tasks.create_task(self._tell(other, notice))

    async def _tell(self, other: int, notice: AbsenceNotice) -> None:
        while True:
            try:
                await self._mates.ask(other, "absence", notice, Noted, AT_ONCE)
                return
            except CallRefused:
                # It has not noticed yet that its leader is gone, which takes up to 20 s for one that is frozen. If it
                # were not told again, it would wait a minute for the member that is absent.
                await asyncio.sleep(_PAUSES[0])
            except NetworkError:
                return  # its own patience does the same, later
