"""The snapshots that a donor keeps while downloads use them, and for a few seconds more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from swarmcli.errors import CallRefused, SiteError
from swarmcli.network.loop_thread import loop_time, offload
from swarmcli.state.snapshot import PinnedState, Snapshot

Lend: TypeAlias = Callable[[Snapshot, bytes], None]  # takes a state with its hashes, and its root
LINGER = 5.0  # seconds for which a snapshot is kept after its last use: newcomers tend to come together


@dataclass(eq=False)
class Pin:
    """A snapshot in use; `version` is the one that was asked for."""

    state: PinnedState
    version: bytes
    taken: float  # loop time at which it was asked for: it is not older
    lent: bool = False  # it is this peer's own download, so it needs no copy
    users: int = 0


class Pins:
    """The snapshots of one donor. Several of version b"" (the newest state) may be in use, since each is soon
    outdated."""

    def __init__(self, provide: Callable[[bytes], Awaitable[Snapshot | None]]) -> None:
        self._provide = provide
        self._pins: list[Pin] = []  # the newest last
        self._coming: dict[bytes, asyncio.Event] = {}
        self._pinning = asyncio.Lock()  # one state is copied at a time
        self._closed = False

    def close(self) -> None:
        """From now on keeps no snapshot that is not in use. Idempotent."""
        self._closed = True
        self._pins.clear()

    def has(self, version: bytes) -> bool:
        """Whether a snapshot of that version is kept, or being downloaded."""
        return self._find(version) is not None or version in self._coming

    @property
    def lent(self) -> set[bytes]:
        """The versions that need no copy: this peer downloads them, or has just done so."""
        return {*self._coming, *(pin.version for pin in self._pins if pin.lent)}

    @asynccontextmanager
    async def use(self, version: bytes, since: float) -> AsyncIterator[Pin]:
        """Holds a snapshot of that version; one of b"" is the state as of `since` (loop time) or later.

        Raises CallRefused if there is none.
        """
        while (coming := self._coming.get(version)) is not None and self._find(version) is None:
            await coming.wait()
        async with self._pinning:  # one at a time: newcomers come together, and the first one's copy serves all
            pin = self._find(version)
            if pin is None or (not version and pin.taken < since):
                if pin is not None:
                    self._let_go(pin)  # before the next copy, which may use its memory
                    pin = None
                taken = loop_time()  # before the copy: a peer that asks while it is made gets a newer one
                snapshot = await self._provide(version)
                if snapshot is None:
                    raise CallRefused("version", "this peer does not have that state")
                try:
                    state = await offload(PinnedState, snapshot)
                except (SiteError, OSError) as error:
                    raise gone(error) from error
                pin = self._add(version, state, taken)
            pin.users += 1
        try:
            yield pin
        finally:
            pin.users -= 1
            self._let_go_later(pin)

    @contextmanager
    def expecting(self, version: bytes) -> Iterator[Lend]:
        """While the block runs, this peer downloads that state itself, and peers that ask for it wait for that.

        Yields a function that takes the state, with its hashes, and its root; others can download it for a while.
        """

        def lend(snapshot: Snapshot, root: bytes) -> None:
            state = PinnedState(snapshot)
            if self._find(version) is None and not self._closed and state.root == root:
                self._let_go_later(self._add(version, state, loop_time(), lent=True))

        coming = self._coming[version] = asyncio.Event()
        try:
            yield lend
        finally:
            if self._coming.get(version) is coming:  # otherwise a later download of the same state has replaced it
                del self._coming[version]
            coming.set()

    def _find(self, version: bytes) -> Pin | None:
        """The newest."""
        return next((pin for pin in reversed(self._pins) if pin.version == version), None)

    def _add(self, version: bytes, state: PinnedState, taken: float, *, lent: bool = False) -> Pin:
        self._pins = [pin for pin in self._pins if pin.version != version or pin.users]
        pin = Pin(state, version, taken, lent)
        if not self._closed:
            self._pins.append(pin)
        return pin

    def _let_go_later(self, pin: Pin) -> None:
        if self._find(pin.version) is not pin:
            self._let_go(pin)  # nobody will ask for it again: there is a newer one
        elif not pin.users:
            asyncio.get_running_loop().call_later(LINGER, self._let_go, pin)

    def _let_go(self, pin: Pin) -> None:
        if not pin.users and pin in self._pins:
            self._pins.remove(pin)


def gone(error: Exception) -> CallRefused:
    return CallRefused("gone", f"part of that state cannot be read any more: {error}")
