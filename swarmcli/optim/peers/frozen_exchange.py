"""Gives this model's frozen weights to newcomers that lack them, and gets the run's before this peer trains.

Which ones are the run's is nobody's word: their digest is part of what must agree, and whoever joins knows it from its
script or recipe. So donors are not trusted, and nobody else is asked whether they are right. A peer to which nobody has
named a digest only hears that those at work have other weights, and takes none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from swarmcli.backoff import growing
from swarmcli.errors import FingerprintError, NetworkError, NoDonorReachable, StateDownloadError
from swarmcli.events import Noticed
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, offload, to_its_end
from swarmcli.optim.peers.claims import Claims
from swarmcli.optim.peers.report import is_settled
from swarmcli.optim.state.frozen import FILE, TERM, FrozenWeights
from swarmcli.optim.state.replica import Replica
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.donor import StateDonor
from swarmcli.state.download import DownloadProgress, download_state
from swarmcli.state.snapshot import Snapshot
from swarmcli.words import amount


@dataclass(frozen=True, slots=True)
class FrozenOptions:
    """How long and among how many a peer looks for frozen weights. Times are seconds."""

    first_pause: float = 0.5  # between two looks for donors, then twice as long each time …
    longest_pause: float = 5.0  # … up to this
    alone_for: float = 15.0  # for which a peer that sees nobody looks for others
    donors: int = 32  # of one look, one of each network after the other
    asked: int = 8  # for their digest, likewise
    answer_timeout: float = 5.0
    in_memory: int = 64 << 20  # bytes up to which a download needs no file
    begins_for: float = 60.0  # may others be found that began at once; after that a word stops nobody who works


class FrozenQuestion(msgspec.Struct, frozen=True):
    """Which frozen weights does this peer's model have?"""


class FrozenAnswer(msgspec.Struct, frozen=True):
    """As FrozenWeights names them; "" for none."""

    digest: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class FrozenExchange:
    """Has one peer compare, get and give the run's frozen weights."""

    options = FrozenOptions()

    def __init__(
        self,
        frozen: FrozenWeights,
        replica: Replica,
        claims: Claims,
        timeout: float,
        courtesy: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`timeout`: seconds for which they are looked for. `courtesy`: see StateDonor."""
        self.frozen = frozen
        self._replica, self._timeout, self._claims = replica, timeout, claims
        self._directory, self._endpoint, run_id = claims.directory, claims.directory.endpoint, claims.directory.run_id
        self._prefix, self._method = f"frozen/{run_id}", f"frozen.digest/{run_id}"
        self._donor = StateDonor(self._endpoint, self._prefix, self._provide, courtesy=courtesy)
        self._progress: DownloadProgress | None = None
        self._moved = 0.0  # loop time; when something of them last came
        self._answers: dict[PeerID, FrozenAnswer | None] = {}  # of those at work; None: it gave none
        self._settled_at: float | None = None  # loop time
        self.looks = True  # whether others may have, or begin with, what this peer must not train beside

    def start(self) -> None:
        """From now on this peer says which ones it has, and gives them out while they are the run's."""
        self._endpoint.serve(self._method, FrozenQuestion, self._tell)
        if self.frozen.digest:
            self._donor.start()

    def close(self) -> None:
        """Idempotent."""
        self._endpoint.withdraw(self._method)
        if self.frozen.digest:
            self._donor.close()

    @property
    def on_its_way(self) -> str:
        """Says what is downloaded now, in words; "": nothing. From any thread."""
        progress = self._progress
        return "" if progress is None else progress.sentence(self._endpoint.rates.download.limit)

    async def look(self) -> None:
        """The model's may be others than before, a checkpoint's for example."""
        if self.frozen.digest:
            await self._replica.alone(self.frozen.look)

    async def compare(self, *, settled: bool) -> None:
        """Before each step, until this peer has worked for a minute. Raises FingerprintError if all at work who answer
        have other frozen weights: it would train another model."""
        frozen, directory, options = self.frozen, self._directory, self.options
        own = frozen.digest or frozen.base
        self._settled_at = (self._settled_at or loop_time()) if settled else None
        begins = self._settled_at is None or loop_time() < self._settled_at + options.begins_for
        self.looks = begins and bool(own) and not frozen.named
        if not self.looks or (frozen.digest and self._claims.holders()):
            return
        at_work = {peer for peer, report in directory.others.items() if report.holds_state and is_settled(report.phase)}
        new = self._claims.in_turn(at_work - self._answers.keys())[: options.asked]
        self._answers |= zip(new, await asyncio.gather(*map(self._ask, new)), strict=True)
        answers = [its for peer, its in self._answers.items() if its is not None and peer in at_work]
        # A former version, and a model without frozen weights, has no base to compare.
        told = [answer.digest for answer in answers if answer.digest or frozen.digest]
        if told and own not in told:
            fix = (
                "or name theirs as frozen_digest to download them"
                if frozen.digest
                else "or give frozen_parameters=() if they need not be equal"
            )
            raise FingerprintError(
                f"{TERM}: this model has {own}, and {len(told)} peers at work have "
                f"{max(told, key=told.count) or 'none'}; load the same ones, {fix}",
                (TERM,),
            )

    async def _ask(self, peer: PeerID) -> FrozenAnswer | None:
        question, timeout = FrozenQuestion(), self.options.answer_timeout
        try:
            return await self._endpoint.call(peer, self._method, question, FrozenAnswer, timeout=timeout)
        except NetworkError:
            return None

    async def _tell(self, peer: PeerID, question: FrozenQuestion) -> FrozenAnswer:
        return FrozenAnswer(self.frozen.digest or self.frozen.base)

    async def obtain(self, gives_up: Callable[[], bool]) -> None:
        """Returns when this model has the run's. Raises StateDownloadError, which says what to do, if nothing of them
        comes for as long as they are looked for."""
        options, told, self._moved = self.options, False, loop_time()
        pauses = growing(options.first_pause, options.longest_pause)
        while not self.frozen.held:
            await self._directory.refresh()
            try:
                await self._download()
            except StateDownloadError as error:
                known = self._directory.others or self._claims.vouching.heard
                patience = self._timeout if known else min(options.alone_for, self._timeout)
                problem = self._lacking(error)
                if gives_up():
                    raise NoDonorReachable(f"told to stop while it waited: {problem}") from error
                pause = next(pauses)
                if loop_time() + pause >= self._moved + patience:
                    raise StateDownloadError(problem, error.attempts) from error
                if not told:
                    self._endpoint.events.emit(Noticed("warning", f"this peer waits for frozen weights: {problem}"))
                    told = True
                await asyncio.sleep(pause)

    async def _download(self) -> None:
        claims, directory, frozen = self._claims, self._directory, self.frozen
        donors = directory.by_convenience(claims.in_turn(claims.holders())[: self.options.donors])
        relayed = [peer for peer in donors if directory.is_relayed(peer)]
        self._progress = progress = DownloadProgress(asyncio.get_running_loop().time, what="the run's frozen weights")
        try:
            state = await download_state(
                self._endpoint,
                self._prefix,
                [peer for peer in donors if peer not in relayed],
                relayed=relayed,
                version=bytes.fromhex(frozen.digest),
                timeout=self._timeout,
                check=frozen.check,
                spool=frozen.directory if frozen.nbytes > self.options.in_memory else None,
                progress=progress,
            )
        except StateDownloadError:
            if progress.moved > progress.began:
                self._moved = progress.moved
            raise
        finally:
            self._progress = None
        await to_its_end(self._take(state))

    async def _take(self, state: DownloadedState) -> None:
        try:
            await self._replica.alone(lambda: self.frozen.take(state.contents, state.digests))
        except OSError as error:
            raise StateDownloadError(f"the frozen weights that came cannot be read here: {error}") from error
        named = ", ".join(donor.short for donor in state.donors)
        text = f"the run's frozen weights, {amount(self.frozen.nbytes, 2)}, came from {named}"
        try:
            await offload(self.frozen.keep)
            news = Noticed("info", text)
        except (OSError, TypeError) as error:
            news = Noticed("warning", f"{text}; after a restart they have to come again, for want of {FILE}: {error}")
        self._endpoint.events.emit(news)

    def _lacking(self, error: StateDownloadError) -> str:
        frozen = self.frozen
        if not frozen.tensors:
            return (
                f"this computer lacks the run's frozen weights, {frozen.digest[:16]}…, and nobody gives them: {error}. "
                "Wait for a peer that has them, or get them from where the run's owner has them"
            )
        return (
            f"this model's frozen weights ({len(frozen.tensors)} tensors, {amount(frozen.nbytes, 2)}) are not the "
            f"run's, {frozen.digest[:16]}…, and nobody gives those: {error}. Load the weights that the run has, or, if "
            f"it is to have this model's, name their digest: {frozen.own or 'they are torn'}"
        )

    async def _provide(self, version: bytes) -> Snapshot | None:
        return self.frozen.snapshot() if self.frozen.held and version.hex() == self.frozen.digest else None
