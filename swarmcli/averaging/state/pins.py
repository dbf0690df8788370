"""The snapshots that a donor holds on to: while downloads use them, and a little longer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from swarmcli.averaging.state.snapshot import PinnedState, Snapshot
from swarmcli.errors import CallRefused
from swarmcli.network.thread import offload

LINGER = 5.0  # seconds for which a snapshot is kept after its last download: newcomers tend to come together
MOST_VERSIONS = 2  # in use at once, beside what was lent: each may take as much memory as the state


Lend: TypeAlias = Callable[[Snapshot, bytes, Sequence[bytes]], None]  # a state, its manifest, its chunks' digests


@dataclass(eq=False)
class Pin:
    """A snapshot in use. `token` names it in messages."""

    state: PinnedState
    token: bytes
    made: float  # loop time
    lent: bool = False  # a download of this peer's own
    users: int = 0


class Pins:
    """Snapshots by the version that was asked for."""

    def __init__(self, provide: Callable[[bytes], Awaitable[Snapshot | None]], random: random.Random) -> None:
        self._provide, self._random = provide, random
        self._pins: dict[bytes, Pin] = {}
        self._coming: dict[bytes, asyncio.Event] = {}
        self._pinning = asyncio.Lock()
        self._closed = False

    def close(self) -> None:
        """Keeps nothing any more beyond its use. Idempotent."""
        self._closed = True
        self._pins.clear()

    def by_token(self, token: bytes) -> PinnedState:
        """Raises CallRefused if there is no such snapshot any more."""
        for pin in self._pins.values():
            if pin.token == token:
                return pin.state
        raise CallRefused("version", "this peer has let go of that state")

    @asynccontextmanager
    async def use(self, version: bytes) -> AsyncIterator[Pin]:
        """Holds a snapshot of that version. Raises CallRefused if there is none, or there are too many others."""
        if (coming := self._coming.get(version)) is not None:
            await coming.wait()
        async with self._pinning:
            pin = self._pins.get(version)
            if pin is None or (not version and _now() - pin.made > LINGER):  # "the newest" does not stay the newest
                pin = await self._make(version)
            pin.users += 1
        try:
            yield pin
        finally:
            pin.users -= 1
            self._let_go_later(version, pin)

    @contextmanager
    def expecting(self, version: bytes) -> Iterator[Lend]:
        """Who asks for this version waits until the block ends; what the yielded function gets is then handed on."""

        def lend(snapshot: Snapshot, manifest: bytes, digests: Sequence[bytes]) -> None:
            state = PinnedState(snapshot, digests)
            if version not in self._pins and not self._closed and state.manifest == manifest:
                self._let_go_later(version, self._add(version, state, lent=True))

        coming = self._coming[version] = asyncio.Event()
        try:
            yield lend
        finally:
            del self._coming[version]
            coming.set()

    async def _make(self, version: bytes) -> Pin:
        in_use = [other for other, pin in self._pins.items() if pin.users and not pin.lent and other != version]
        if len(in_use) >= MOST_VERSIONS:
            raise CallRefused("busy", f"{len(in_use)} other states are being downloaded from this peer")
        snapshot = await self._provide(version)
        if snapshot is None:
            raise CallRefused("version", "this peer does not have that state")
        return self._add(version, await offload(PinnedState, snapshot))

    def _add(self, version: bytes, state: PinnedState, *, lent: bool = False) -> Pin:
        pin = Pin(state, self._random.randbytes(16), _now(), lent)
        if not self._closed:
            self._pins[version] = pin
        return pin

    def _let_go_later(self, version: bytes, pin: Pin) -> None:
        if not pin.users and self._pins.get(version) is pin:
            asyncio.get_running_loop().call_later(LINGER, self._let_go, version, pin)

    def _let_go(self, version: bytes, pin: Pin) -> None:
        if not pin.users and self._pins.get(version) is pin:
            del self._pins[version]


def _now() -> float:
    return asyncio.get_running_loop().time()
