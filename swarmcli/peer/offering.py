"""Brings the recipe from a peer of the run to the holder of a link.

Every peer whose recipe can travel answers `run.recipe`; the connection is authenticated, so the text comes from the
peer that the link names. What it says beyond the recipe (how fast the run goes) is its word alone, and only shown.

The answer also has a saved model's config, and the hashes of the tokenizer's files. The newcomer checks the hashes
against the link, and then asks for these files piece by piece by `run.file`: so it does not matter which peer gives
them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
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
from swarmcli.network.loop_thread import LoopThread, offload
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.owner.invitations import visiting
from swarmcli.peer.admission import Version
from swarmcli.recipe import Link, Recipe, read_offered
from swarmcli.recipe.offered import MAX_OFFERED, MOST_FILES_BYTES, RunEstimate, files_of
from swarmcli.run.asking import Visitor
from swarmcli.version import build, unlike
from swarmcli.words import printable

if TYPE_CHECKING:
    from swarmcli.optim.config import Role  # it imports torch

T = TypeVar("T")
METHOD, FILE_METHOD = "run.recipe", "run.file"
PIECE = 256 << 10  # bytes of a file in one answer; both ends have to agree
MAX_PEERS = 1 << 20  # peers of one role that an answer may name
# How long a volunteer waits, in seconds.
RECIPE_SECONDS = 15.0  # for the dial, and as long for the recipe
PIECE_SECONDS = 30.0  # for one answer with a piece of a file …
FILES_SECONDS = 900.0  # … and for all of them
HEAD_START = 20.0  # for the peer that answered first, before another one is asked for files as well

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_PEERS)]


class RecipeWanted(msgspec.Struct, frozen=True):
    """A volunteer with a link asks for the recipe of its run."""

    run_id: Annotated[str, msgspec.Meta(max_length=64)]


class RecipeOffered(msgspec.Struct, frozen=True):
    """The part of the recipe that travels, and how the run goes: hearsay, for an estimate of the traffic."""

    recipe: Annotated[str, msgspec.Meta(max_length=MAX_OFFERED)]  # checked again in bytes
    epoch: int = 0
    epoch_seconds: float = 0.0  # how long an epoch takes lately; 0: not known
    trainers: Count = 0  # peers that take part, as the answering peer sees it; all 0: not known
    monitors: Count = 0
    auxiliaries: Count = 0
    contents: Annotated[str, msgspec.Meta(max_length=MAX_OFFERED)] = ""  # of saved models, see `offered_contents`
    version: Version = ""  # of swarm

    @property
    def going(self) -> RunEstimate:
        return RunEstimate(self.epoch_seconds, self.trainers, self.monitors, self.auxiliaries)


class FileWanted(msgspec.Struct, frozen=True):
    """A volunteer with a link asks for a piece of one of the tokenizer's files."""

    run_id: Annotated[str, msgspec.Meta(max_length=64)]
    name: Annotated[str, msgspec.Meta(max_length=96)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=MOST_FILES_BYTES)]


class FilePiece(msgspec.Struct, frozen=True):
    """PIECE bytes, or the rest of the file."""

    size: Annotated[int, msgspec.Meta(ge=0, le=MOST_FILES_BYTES)]  # of the whole file
    data: Annotated[bytes, msgspec.Meta(max_length=PIECE)]


class RecipeService:
    """Hands out one run's recipe."""

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        text: str,
        roles: Callable[[], Iterable[Role]] = tuple,
        *,
        contents: str = "",
        files: Mapping[str, Path] | None = None,
    ) -> None:
        """`text`, `contents`, `files`: what `offered`, `offered_contents` and `offered_files` made of the recipe.
        `roles`: of all peers of the run, also this one."""
        self._run_id = run_id
        self._contents, self._files = contents, dict(files or {})
        self._text = text
        self._roles = roles
        self._epoch = 0
        self._seconds = deque[float](maxlen=8)  # their median is the pace, since some epochs wait, or are short
        endpoint.serve(METHOD, RecipeWanted, self._answer)
        if self._files:
            endpoint.serve(FILE_METHOD, FileWanted, self._give)

    def note(self, event: Event) -> None:
        """Listens to the peer's events."""
        if isinstance(event, EpochAdvanced):
            self._epoch = event.epoch
            if event.samples:
                self._seconds.append(event.seconds)

    async def _answer(self, peer: PeerID, wanted: RecipeWanted) -> RecipeOffered:
        self._check(wanted.run_id)
        seconds, there = median(self._seconds or [0.0]), Counter(self._roles())
        trainers, monitors, helpers = (min(there[role], MAX_PEERS) for role in ("trainer", "monitor", "auxiliary"))
        return RecipeOffered(self._text, self._epoch, seconds, trainers, monitors, helpers, self._contents, build())

    async def _give(self, peer: PeerID, wanted: FileWanted) -> FilePiece:
        self._check(wanted.run_id)
        path = self._files.get(wanted.name)
        if path is None:
            raise CallRefused("file", "the tokenizer has no such file")

        def read() -> FilePiece:
            with path.open("rb") as stream:
                stream.seek(wanted.offset)
                return FilePiece(path.stat().st_size, stream.read(PIECE))

        try:
            return await offload(read)
        except OSError as error:
            raise CallRefused("file", f"it cannot be read ({error.strerror})") from error

    def _check(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise CallRefused("run", f"this peer takes part in {self._run_id!r}")


def fetch_recipe(
    link: Link, directory: Path, bring: Callable[[Mapping[Path, bytes]], object] = bool
) -> tuple[Recipe, RecipeOffered]:
    """Returns the recipe of a link, from whichever of its peers hands it out first, checked by `read_offered`.

    `bring` gets the files of its saved model and tokenizer, whole and checked, by their places below `directory`.

    For a thread without a loop. Raises BootstrapError when none of the peers answers at any of its addresses. If some
    do, it raises the error of one: FingerprintError if that peer is in no run or in another one, and RecipeError as
    `read_offered` does. Raises MembershipError for an invitation that is not for this computer, and RecipeError if the
    recipe has another owner than the invitation.
    """
    visitor = visiting(link.ticket, link.fingerprint, directory / link.run_id) if link.ticket is not None else None
    thread = LoopThread.acquire()
    try:
        recipe, answer, files = thread.run(_ask_each(link, visitor, directory))
    finally:
        thread.release()
    if link.ticket is not None and (recipe.access, recipe.run_key) != ("invite", link.ticket.run_key.text):
        raise RecipeError(f"{recipe.origin('run_key')}: the invitation of the link is not of this run's owner")
    if files:
        bring(files)
    return recipe, answer


Fetched = tuple[Recipe, RecipeOffered, dict[Path, bytes]]


async def _ask_each(link: Link, visitor: Visitor | None, directory: Path) -> Fetched:
    """Asks all of the link's peers at once; one that is gone, slow or lies costs nothing if another one answers."""

    failures: list[SwarmError] = []
    got: dict[str, bytes] = {}  # the tokenizer's files by their names, whoever gave them
    turn = asyncio.Lock()

    async def ask(one: Link) -> Fetched | None:
        known: dict[str, Any] = {}
        try:
            async with _met(one, visitor) as endpoint:
                answer = await _recipe_from(endpoint, one)
                data = answer.recipe.encode(errors="replace")
                try:
                    recipe = read_offered(data, one, directory, answer.contents, known.update)
                except RecipeError as error:
                    versions, what = unlike(answer.version), str(error)
                    raise RecipeError(f"{what.partition(';')[0]}; {versions}" if versions else what) from None
                if known and known["tokenizer"] != "bytes":
                    async with _in_turn(turn, HEAD_START):
                        await fetch_files(endpoint, one, known["tokenizer"], got)
            return recipe, answer, files_of(recipe, known, got) if known else {}
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


async def fetch_files(endpoint: Endpoint, link: Link, wanted: Mapping[str, str], got: dict[str, bytes]) -> None:
    """Gets the files of these names and SHA-256 that are not in `got` yet, from the first peer of the link. Raises
    SwarmError for a peer that gives other files or too many bytes, or gives them too slowly."""
    try:
        async with asyncio.timeout(FILES_SECONDS):
            for name, digest in wanted.items():
                if name not in got:
                    data = await _fetch_file(endpoint, link, name, MOST_FILES_BYTES - sum(map(len, got.values())))
                    if hashlib.sha256(data).hexdigest() != digest:
                        raise SwarmError(f"{link.peer_id.short} gives another {name} than the link speaks of")
                    got[name] = data
    except (NetworkError, TimeoutError) as error:
        why = printable(str(error)) or f"it takes more than {FILES_SECONDS:g} s"
        raise SwarmError(
            f"the files of the tokenizer did not come from {link.peer_id.short}: {why}; try again, or ask for another "
            "link"
        ) from None


async def _fetch_file(endpoint: Endpoint, link: Link, name: str, most: int) -> bytes:
    """Fetches a file in pieces from the link's peer. Each answer must have as many bytes as it can, so a peer cannot
    stretch a file over more answers than needed. Raises SwarmError if an answer has not, or if the file has more than
    `most` bytes."""
    data, size = bytearray(), -1
    while len(data) != size:
        question = FileWanted(link.run_id, name, len(data))
        piece = await endpoint.call(link.peer_id, FILE_METHOD, question, FilePiece, timeout=PIECE_SECONDS)
        size = piece.size if size < 0 else size
        if size > most or piece.size != size or len(piece.data) != min(PIECE, size - len(data)):
            raise SwarmError(f"{link.peer_id.short} gives {name} in other pieces than it says, or too much of it")
        data += piece.data
    return bytes(data)


@asynccontextmanager
async def _in_turn(turn: asyncio.Lock, patience: float) -> AsyncIterator[None]:
    """Lets one caller after the other enter the block, but none waits longer than `patience` seconds: the one before
    may be slow on purpose."""
    mine = False
    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            mine = await turn.acquire()
    try:
        yield
    finally:
        if mine:
            turn.release()


async def _recipe_from(endpoint: Endpoint, link: Link) -> RecipeOffered:
    wanted = RecipeWanted(link.run_id)
    answer = await endpoint.call(link.peer_id, METHOD, wanted, RecipeOffered, timeout=RECIPE_SECONDS)
    pace = answer.epoch_seconds
    sane = math.isfinite(pace) and 0.0 <= pace <= 7 * 86_400.0 and 0 <= answer.epoch < 1 << 53
    return answer if sane else msgspec.structs.replace(answer, epoch=0, epoch_seconds=0.0)


@asynccontextmanager
async def _met(link: Link, visitor: Visitor | None) -> AsyncIterator[Endpoint]:
    """A connection to the first peer of the link, with an identity made for this one question unless a visitor of a
    closed run asks. Errors in the block are raised in the words of the recipe's fetch."""
    identity, membership = (visitor.identity, visitor.membership) if visitor else (Identity.generate(), None)
    endpoint = Endpoint(TCPTransport(identity), client_mode=True, membership=membership)
    try:
        await endpoint.start()
        await _dial(endpoint, link.each[0].addresses)
        yield endpoint
    except CallRefused as error:
        raise FingerprintError(
            f"{link.peer_id.short} does not offer the run {link.run_id!r} ({printable(str(error))}); ask for a new link"
        ) from None
    except UnknownMethod:
        raise FingerprintError(
            f"{link.peer_id.short} answers, but hands out no recipe: its run is not one that links can join, or its "
            "version of swarm is older; ask for a new link, or for the recipe file"
        ) from None
    except NetworkError as error:  # of the call, or of the connection, which the contact may end
        raise SwarmError(
            f"the recipe did not come from {link.peer_id.short}: {printable(str(error))}; try again"
        ) from None
    finally:
        await endpoint.close()
        identity.close()


async def _dial(endpoint: Endpoint, addresses: Sequence[str]) -> None:
    """Connects at whichever of the addresses answers first; all of them are one peer's."""
    failures: dict[str, Exception] = {}

    async def dial(address: str) -> PeerID | None:
        try:
            return await endpoint.connect(address, timeout=RECIPE_SECONDS)
        except NetworkError as error:
            failures[address] = error
            return None

    if await _first(map(dial, addresses)) is None:
        raise BootstrapError("the peer that the link names does not answer", failures)


async def _first(attempts: Iterable[Coroutine[Any, Any, T | None]]) -> T | None:
    """Returns the result of the first attempt that succeeds (one that fails returns None); cancels the others."""
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
