"""The recipe on its way from a peer of the run to the holder of a link.

Every peer whose recipe can travel answers `run.recipe`; the connection is authenticated, so the text comes from the
peer that the link names. What it says beyond the recipe (how fast the run goes) is its word alone, and only shown.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from swarmcli.errors import (
    BootstrapError,
    CallRefused,
    FingerprintError,
    NetworkError,
    RecipeError,
    SwarmError,
    UnknownMethod,
)
from swarmcli.events import EpochAdvanced, Event
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import LoopThread
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.owner.invitations import visiting
from swarmcli.recipe import Link, Recipe, read_offered
from swarmcli.recipe.offered import MAX_OFFERED, Going
from swarmcli.run.asking import Visitor
from swarmcli.words import printable

if TYPE_CHECKING:
    from swarmcli.optim.config import Role  # it brings torch along

T = TypeVar("T")
METHOD = "run.recipe"
MAX_PEERS = 1 << 20  # of each role that a run may be said to have

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_PEERS)]


class RecipeWanted(msgspec.Struct, frozen=True):
    """A volunteer with a link asks for the recipe of its run."""

    run_id: Annotated[str, msgspec.Meta(max_length=64)]


class RecipeOffered(msgspec.Struct, frozen=True):
    """The part of the recipe that travels, and how the run goes: hearsay, for an estimate of the traffic."""

    recipe: Annotated[str, msgspec.Meta(max_length=MAX_OFFERED)]  # checked again in bytes
    epoch: int = 0
    epoch_seconds: float = 0.0  # that one takes lately; 0: not known
    trainers: Count = 0  # that take part, as the answering peer sees it; all 0: not known
    monitors: Count = 0
    auxiliaries: Count = 0

    @property
    def going(self) -> Going:
        return Going(self.epoch_seconds, self.trainers, self.monitors, self.auxiliaries)


class RecipeService:
    """Hands out one run's recipe."""

    def __init__(self, endpoint: Endpoint, run_id: str, text: str, roles: Callable[[], Iterable[Role]] = tuple) -> None:
        """`text`: what `offered` made of the recipe. `roles`: of all peers of the run, this one included."""
        self._run_id = run_id
        self._text = text
        self._roles = roles
        self._epoch = 0
        self._seconds = deque[float](maxlen=8)  # the middle one is the pace: epochs that wait, or are short, are not
        endpoint.serve(METHOD, RecipeWanted, self._answer)

    def note(self, event: Event) -> None:
        """Listens to the peer's events."""
        if isinstance(event, EpochAdvanced):
            self._epoch = event.epoch
            if event.samples:
                self._seconds.append(event.seconds)

    async def _answer(self, peer: PeerID, wanted: RecipeWanted) -> RecipeOffered:
        if wanted.run_id != self._run_id:
            raise CallRefused("run", f"this peer takes part in {self._run_id!r}")
        seconds, there = median(self._seconds or [0.0]), Counter(self._roles())
        peers = (min(there[role], MAX_PEERS) for role in ("trainer", "monitor", "auxiliary"))
        return RecipeOffered(self._text, self._epoch, seconds, *peers)


def fetch_recipe(link: Link, directory: Path) -> tuple[Recipe, RecipeOffered]:
    """The recipe that a link speaks of, from whichever of its peers hands it out first, checked by `read_offered`.

    For a thread without a loop. Raises BootstrapError when none of the peers answers at any of its addresses; for the
    peer that came furthest FingerprintError when it is in no run or in another one, and RecipeError as `read_offered`
    does; MembershipError for an invitation that is not for this computer, and RecipeError where the recipe has another
    owner than the invitation.
    """
    visitor = visiting(link.ticket, link.fingerprint, directory / link.run_id) if link.ticket is not None else None
    thread = LoopThread.acquire()
    try:
        recipe, answer = thread.run(_ask_each(link, visitor, directory))
    finally:
        thread.release()
    if link.ticket is not None and (recipe.access, recipe.run_key) != ("invite", link.ticket.run_key.text):
        raise RecipeError(f"{recipe.origin('run_key')}: the invitation of the link is not of this run's owner")
    return recipe, answer


async def _ask_each(link: Link, visitor: Visitor | None, directory: Path) -> tuple[Recipe, RecipeOffered]:
    """Asks all of the link's peers at once; one that is gone, slow or false costs nothing where another one answers."""

    failures: list[SwarmError] = []

    async def ask(one: Link) -> tuple[Recipe, RecipeOffered] | None:
        try:
            answer = await ask_for_recipe(one, visitor)
            return read_offered(answer.recipe.encode(errors="replace"), one, directory), answer
        except SwarmError as error:
            failures.append(error)
            return None

    if (found := await _first(map(ask, link.each))) is not None:
        return found
    silent = [error for error in failures if isinstance(error, BootstrapError)]
    if len(silent) == len(failures) > 1:
        attempts = {address: why for error in silent for address, why in error.attempts.items()}
        raise BootstrapError("none of the peers that the link names answers", attempts)
    raise next(error for error in failures if error not in silent or len(failures) == 1)


async def ask_for_recipe(link: Link, visitor: Visitor | None = None, *, timeout: float = 15.0) -> RecipeOffered:
    """Gets what the first peer that the link names hands out, unread. The asker is nobody: an identity of its own for
    this one question, unless it is a visitor of a closed run. `timeout`: seconds, for the dial and for the answer."""
    identity, membership = (visitor.identity, visitor.membership) if visitor else (Identity.generate(), None)
    endpoint = Endpoint(TCPTransport(identity), client_mode=True, membership=membership)
    try:
        await endpoint.start()
        await _dial(endpoint, link.each[0].addresses, timeout)
        wanted = RecipeWanted(link.run_id)
        answer = await endpoint.call(link.peer_id, METHOD, wanted, RecipeOffered, timeout=timeout)
        pace = answer.epoch_seconds
        sane = math.isfinite(pace) and 0.0 <= pace <= 7 * 86_400.0 and 0 <= answer.epoch < 1 << 53
        return answer if sane else msgspec.structs.replace(answer, epoch=0, epoch_seconds=0.0)
    except CallRefused as error:
        raise FingerprintError(
            f"{link.peer_id.short} does not offer the run {link.run_id!r} ({printable(str(error))}); ask for a new link"
        ) from None
    except UnknownMethod:
        raise FingerprintError(
            f"{link.peer_id.short} answers, but hands out no recipe: its run is not one that links can join, or its "
            "version of swarm is older; ask for a new link, or for the recipe file"
        ) from None
    except NetworkError as error:  # of the call, and of the connection, which the contact may end
        raise SwarmError(
            f"the recipe did not come from {link.peer_id.short}: {printable(str(error))}; try again"
        ) from None
    finally:
        await endpoint.close()
        identity.close()


async def _dial(endpoint: Endpoint, addresses: Sequence[str], timeout: float) -> None:
    """Connects at whichever of the addresses answers first; all of them are one peer's."""
    failures: dict[str, Exception] = {}

    async def dial(address: str) -> PeerID | None:
        try:
            return await endpoint.connect(address, timeout=timeout)
        except NetworkError as error:
            failures[address] = error
            return None

    if await _first(map(dial, addresses)) is None:
        raise BootstrapError("the peer that the link names does not answer", failures)


async def _first(attempts: Iterable[Coroutine[Any, Any, T | None]]) -> T | None:
    """The result of the first attempt that does not fail, which is to bring None; the others end."""
    tasks = [asyncio.create_task(attempt) for attempt in attempts]
    try:
        for task in asyncio.as_completed(tasks):
            if (found := await task) is not None:
                return found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return None
