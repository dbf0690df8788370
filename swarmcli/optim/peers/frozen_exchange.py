"""Gives this model's frozen weights to newcomers that lack them, and gets the run's before this peer trains.

Their digest is part of what must agree, and a peer that joins knows it from its script or recipe. So it need not trust
donors, and asks nobody else whether they are right. A peer without a digest only compares its weights with the reports
of those at work, and downloads none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarmcli.backoff import growing
from swarmcli.errors import FingerprintError, NoDonorReachable, StateDownloadError
from swarmcli.events import Noticed
from swarmcli.network.loop_thread import loop_time, offload, to_its_end
from swarmcli.optim.peers.exchange import Handover
from swarmcli.optim.peers.follow import Claims
from swarmcli.optim.peers.report import is_settled
from swarmcli.optim.state.frozen import FILE, TERM, FrozenWeights
from swarmcli.optim.state.replica import Replica
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.snapshot import Snapshot
from swarmcli.words import format_size

# Seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # between two looks for donors: twice as long each time
ALONE_FOR = 15.0  # for which a peer that sees nobody looks for others
BEGINS_FOR = 60.0  # in which this peer may find others that began with it; after that no report stops a peer at work
MOST_DONORS = 32  # that are asked at a time, the networks in turn
IN_MEMORY = 64 << 20  # bytes up to which a download needs no file


class FrozenExchange(Handover):
    """One peer's part: it compares, gets and gives the run's frozen weights."""

    def __init__(
        self,
        frozen: FrozenWeights,
        replica: Replica,
        claims: Claims,
        timeout: float,
        courtesy: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`timeout`: seconds for which it looks for them while nothing comes. `courtesy`: see StateDonor."""
        super().__init__(f"frozen/{claims.directory.run_id}", self._provide, replica, claims, courtesy)
        self.frozen, self._timeout = frozen, timeout
        self._settled_at: float | None = None  # loop time
        self.looks = True  # whether to compare with others: they may train, or begin, with other frozen weights

    def start(self) -> None:
        """From now on this peer gives out its frozen weights while they are the run's."""
        if self.frozen.digest:
            self.donor.start()

    def close(self) -> None:
        """Gives out nothing any more. Idempotent."""
        if self.frozen.digest:
            self.donor.close()

    async def look(self) -> None:
        """Looks at the model's frozen weights again, which a checkpoint, for example, may have replaced."""
        if self.frozen.digest:
            await self._replica.alone(self.frozen.look)

    def compare(self, *, settled: bool) -> None:
        """Call it before each step, until this peer has worked for a minute. Raises FingerprintError if all peers at
        work that are there report other frozen weights: this peer would train another model."""
        frozen, own = self.frozen, self.frozen.told
        self._settled_at = (self._settled_at or loop_time()) if settled else None
        begins = self._settled_at is None or loop_time() < self._settled_at + BEGINS_FOR
        self.looks = begins and bool(own) and not frozen.named
        if not self.looks or (frozen.digest and self._claims.holders()):
            return
        there = [report for peer, report in self._directory.others.items() if self._directory.is_there(peer)]
        at_work = [report for report in there if report.holds_state and is_settled(report.phase)]
        # A model without frozen weights has no base to compare.
        told = [report.frozen for report in at_work if report.frozen or frozen.digest]
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

    async def obtain(self, gives_up: Callable[[], bool]) -> None:
        """Returns when this model has the run's frozen weights. Raises StateDownloadError, which says what to do, if
        nothing of them comes within the timeout, and NoDonorReachable if `gives_up` says so."""
        told, began, pauses = False, loop_time(), growing(FIRST_PAUSE, LONGEST_PAUSE)
        while not self.frozen.held:
            await self._directory.refresh()
            try:
                await self._download()
            except StateDownloadError as error:
                known = self._directory.others or self._claims.vouching.heard
                patience = self._timeout if known else min(ALONE_FOR, self._timeout)
                problem = self._lacking(error)
                if gives_up():
                    raise NoDonorReachable(f"told to stop while it waited: {problem}") from error
                pause = next(pauses)
                if loop_time() + pause >= max(began, self.moved) + patience:
                    raise StateDownloadError(problem, error.attempts) from error
                if not told:
                    self._endpoint.events.emit(Noticed("warning", f"this peer waits for frozen weights: {problem}"))
                    told = True
                await asyncio.sleep(pause)

    async def _download(self) -> None:
        claims, frozen = self._claims, self.frozen
        donors = self._directory.by_convenience(claims.in_turn(claims.holders())[:MOST_DONORS])
        state = await self._get(
            "the run's frozen weights",
            donors,
            version=bytes.fromhex(frozen.digest),
            timeout=self._timeout,
            check=frozen.check,
            spool=frozen.directory if frozen.nbytes > IN_MEMORY else None,
        )
        await to_its_end(self._take(state))

    async def _take(self, state: DownloadedState) -> None:
        try:
            await self._replica.alone(lambda: self.frozen.take(state.contents, state.digests))
        except OSError as error:
            raise StateDownloadError(f"the frozen weights that came cannot be read here: {error}") from error
        named = ", ".join(donor.short for donor in state.donors)
        text = f"the run's frozen weights, {format_size(self.frozen.nbytes)}, came from {named}"
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
            f"this model's frozen weights ({len(frozen.tensors)} tensors, {format_size(frozen.nbytes)}) are not the "
            f"run's, {frozen.digest[:16]}…, and nobody gives those: {error}. Load the weights that the run has, or, if "
            f"it is to have this model's, name their digest: {frozen.own or 'they are torn'}"
        )

    async def _provide(self, version: bytes) -> Snapshot | None:
        return self.frozen.snapshot() if self.frozen.held and version.hex() == self.frozen.digest else None
