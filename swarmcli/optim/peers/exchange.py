"""Gives this peer's state to those who need it, and takes over the state of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swarmcli.compression import TensorRole
from swarmcli.errors import CallRefused, OptimizerError, SiteError, StateDownloadError
from swarmcli.events import Noticed, PeerRefused, StateDonated, StateDownloaded
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, offload, to_its_end
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.peers.follow import Claims
from swarmcli.optim.state.lineage import LineagePosition, hash_tensors
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.training_state import CapturedState, read_position
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.distant import loaded
from swarmcli.state.donor import StateDonor
from swarmcli.state.download import DownloadProgress, download_state
from swarmcli.state.snapshot import Snapshot, StateOutline
from swarmcli.state.witnesses import Witnesses, contradicted

LOSSY = (
    "the state came with a lossy codec (load_state_compression of its donor), so this peer's parameters are not those "
    "of the others in every bit, until the states are averaged"
)
_ROLES = {"parameter": TensorRole.PARAMETER, "statistic": TensorRole.OPTIMIZER, "gradient": TensorRole.GRADIENT}


class Handover:
    """Gives to others, and gets from them, one thing that all peers of a run need. `prefix` names it."""

    def __init__(
        self,
        prefix: str,
        provide: Callable[[bytes], Awaitable[Snapshot | None]],
        replica: Replica,
        claims: Claims,
        courtesy: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`provide`, `courtesy`: see StateDonor."""
        self._replica, self._claims, self._directory = replica, claims, claims.directory
        self._endpoint, self._prefix = claims.directory.endpoint, prefix
        self.donor = StateDonor(self._endpoint, prefix, provide, donated=self._donated, courtesy=courtesy)
        self._progress: DownloadProgress | None = None
        self.speed = 0.0  # bytes per second of the last download that succeeded; 0: none did
        self.moved = 0.0  # loop time when anything last came of a download that failed; false data does not count

    @contextmanager
    def progress(self, what: str) -> Iterator[DownloadProgress]:
        """For a download within the block: people see how far it is. `what`: what is downloaded, in words."""
        self._progress = progress = DownloadProgress(asyncio.get_running_loop().time, what=what)
        try:
            yield progress
            self.speed = progress.received / max(progress.clock() - progress.began, 1e-3)
        except StateDownloadError:
            if progress.moved > progress.began:
                self.moved = progress.moved
            raise
        finally:
            self._progress = None

    @property
    def on_its_way(self) -> str:
        """The download under way, in words; "": nothing. From any thread."""
        progress = self._progress
        return "" if progress is None else progress.sentence(self._endpoint.rates.download.limit)

    async def _get(self, what: str, donors: Sequence[PeerID], **more: Any) -> DownloadedState:
        """Downloads from these donors, the first ones first; from those behind relays only if no other one gives it.
        `more`: see `download_state`."""
        relayed = [peer for peer in donors if self._directory.is_relayed(peer)]
        direct = [peer for peer in donors if peer not in relayed]
        with self.progress(what) as progress:
            return await download_state(
                self._endpoint, self._prefix, direct, relayed=relayed, progress=progress, **more
            )

    def _donated(self, peer: PeerID, snapshot: Snapshot, sent: int) -> None:
        """A peer has downloaded from here. Only StateExchange tells of it."""


class StateExchange(Handover):
    """Gives out the replica's present state, under its lineage, and replaces it by another peer's."""

    def __init__(
        self,
        replica: Replica,
        mode: Mode,
        claims: Claims,
        courtesy: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`courtesy` returns when this peer does not need its line for a round.

        A peer that downloads a state with a lossy codec warns its user: its parameters are not those of the others in
        every bit.
        """
        super().__init__(claims.directory.run_id, self._provide, replica, claims, courtesy)
        self._codec = mode.state.load_compression
        # Whether peers of one lineage hold equal states, so that they can be compared.
        self._alike = not mode.local and mode.target_group_size is None

    async def download(
        self,
        wanted: LineagePosition,
        donors: Sequence[PeerID],
        *,
        witnesses: Sequence[PeerID] = (),
        parameters: bytes | None = None,
        timeout: float,
        reason: str,
    ) -> None:
        """Takes over the state at `wanted` from these donors, the first ones first. The caller drops earlier gradients.

        If more of the `witnesses` contradict a state than bear it out, this peer refuses it and asks others.
        `parameters`: the SHA-256 of this state's parameters that the run's owner has signed; then it needs no
        witnesses.

        Raises StateDownloadError, which says what failed with each donor, if none gives it, or after `timeout` seconds
        in which nothing of it came. Then nothing has changed, unless what came could not be read here: then the state
        may be torn, see TrainingState.restore.
        """
        began = loop_time()
        with self.donor.expecting(wanted.lineage) as lend:  # newcomers often come together
            asked = witnesses if self._alike else ()
            asking = Witnesses(self._endpoint, self._prefix, wanted.lineage, asked)
            try:
                state = await self._download_true(wanted, donors, asking, parameters, timeout)
            finally:
                await asking.close()
            await to_its_end(self._restore(wanted, state))
            if state.exact:
                lend(state.snapshot(), state.root)
            else:
                self._endpoint.events.emit(Noticed("warning", LOSSY))
        self._endpoint.events.emit(
            StateDownloaded(
                epoch=wanted.epoch,
                lineage=wanted.lineage.hex(),
                donors=tuple(donor.text for donor in state.donors),
                bytes=state.received,
                seconds=loop_time() - began,
                reason=reason,
            )
        )

    async def _download_true(
        self,
        wanted: LineagePosition,
        donors: Sequence[PeerID],
        asking: Witnesses,
        parameters: bytes | None,
        timeout: float,
    ) -> DownloadedState:
        """Downloads from one donor after the other, until the witnesses do not contradict a state."""
        attempts: dict[str, str] = {}
        while True:
            state = await self._get(
                "the state",
                [donor for donor in donors if donor.text not in attempts],
                version=wanted.lineage,
                timeout=timeout,
                check=self._check,
                spool=self._replica.state.statistics.spool,
            )
            if parameters is not None:
                false = await offload(_hash_of_parameters, state) != parameters
            else:
                false = contradicted(state.root, state.donors, await asking.roots(), self._directory.network_of)
            if not false:
                return state
            # Nobody is disbelieved for it: replicas with other libraries or processors differ in their last bits.
            for donor in state.donors:
                attempts[donor.text] = "it gives out another state than the others hold under this lineage"
                self._endpoint.events.emit(PeerRefused(donor.text, attempts[donor.text], "state"))
            if not {donor.text for donor in donors} - attempts.keys():
                raise StateDownloadError("the state that came is not the one that others hold", attempts)

    def _check(self, outline: StateOutline) -> None:
        """Checks the outline of a state, before memory is allocated for it. Raises ValueError."""
        read_position(outline.metadata)
        self._replica.state.check_tensors(outline.descriptors)
        self._replica.state.fit(outline.metadata)

    async def _restore(self, wanted: LineagePosition, state: DownloadedState) -> None:
        try:
            position = read_position(state.metadata)
            if position != wanted:
                raise ValueError(f"it was asked for as epoch {wanted.epoch} and says epoch {position.epoch}")
            await self._replica.restore(CapturedState(state.metadata, state.contents))
        except ValueError as error:
            attempts = {donor.text: f"its state does not fit: {error}" for donor in state.donors}
            for donor, reason in attempts.items():
                self._endpoint.events.emit(PeerRefused(donor, reason, "state"))
            raise StateDownloadError(f"the state that came does not fit: {error}", attempts) from error
        except OSError as error:
            raise StateDownloadError(f"the state that came cannot be read here: {error}") from error

    async def _provide(self, version: bytes) -> Snapshot | None:
        if version != self._replica.position.lineage:
            return None
        try:
            captured = await self._replica.capture()
        except OptimizerError:  # it is torn
            return None
        except (SiteError, OSError) as error:
            raise CallRefused("gone", f"this peer's state cannot be read: {error}") from error
        lineage = captured.metadata["lineage"]
        if lineage != version:
            return None
        roles = {name: _ROLES.get(name.partition("/")[0], TensorRole.UNSPECIFIED) for name in captured.tensors}
        return Snapshot(version, captured.metadata, captured.tensors, self._codec, roles)

    def _donated(self, peer: PeerID, snapshot: Snapshot, sent: int) -> None:
        self._endpoint.events.emit(StateDonated(peer.text, snapshot.metadata["epoch"], sent))


def _hash_of_parameters(state: DownloadedState) -> bytes:
    """SHA-256 over the parameters, as TrainingState.digest computes it at a peer that holds them."""
    named = {name: tensor for name, tensor in state.contents.items() if name.startswith("parameter/")}
    ordered = sorted(named, key=lambda name: int(name.partition("/")[2]))
    return hash_tensors(t if isinstance(t := named[name], torch.Tensor) else loaded(t) for name in ordered)
