"""Whether two peers are in the same run, found out before anything else is exchanged.

The DHT knows no recipes, so the fingerprint (one short hash for each recipe key that must agree) is shown to the
first contacts when a peer joins. A contact answers with the keys that differ; hashes travel, never values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from swarmcli.errors import CallError, FingerprintError, NetworkError
from swarmcli.events import PeerRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.recipe import differing_keys
from swarmcli.words import printable

METHOD = "run.hello"
MAX_KEYS = 512
MAX_TEXT = 128


class Hello(msgspec.Struct, frozen=True):
    """A newcomer's run and fingerprint."""

    run_id: str
    fingerprint: dict[str, str]


class Welcome(msgspec.Struct, frozen=True):
    """The answer: `differing` is empty when the newcomer may join."""

    run_id: str
    differing: list[str]


class Admission:
    """Answers newcomers and asks first contacts, for one run."""

    def __init__(
        self, endpoint: Endpoint, run_id: str, fingerprint: Mapping[str, str], values: Mapping[str, Any] | None = None
    ) -> None:
        """`values`: this peer's own, by the keys of the fingerprint: what it is told of a refusal names them."""
        self._endpoint = endpoint
        self._run_id = run_id
        self._fingerprint = dict(fingerprint)
        self._values = values or {}
        endpoint.serve(METHOD, Hello, self._greet)

    async def _greet(self, peer: PeerID, hello: Hello) -> Welcome:
        if hello.run_id != self._run_id:
            self._report(peer, f"it asked for the run {hello.run_id[:MAX_TEXT]!r}")
            return Welcome(self._run_id, ["run_id"])
        theirs = {key[:MAX_TEXT]: value for key, value in list(hello.fingerprint.items())[:MAX_KEYS]}
        differing = differing_keys(self._fingerprint, theirs)
        if differing:
            self._report(peer, "its recipe differs in " + ", ".join(differing[:8]))
        return Welcome(self._run_id, differing[:MAX_KEYS])

    def _report(self, peer: PeerID, reason: str) -> None:
        self._endpoint.events.emit(PeerRefused(peer.text, reason, what="recipe"))

    async def ask(self, contacts: Iterable[PeerID], *, timeout: float = 5.0) -> list[PeerID]:
        """Shows the fingerprint to every contact; returns those of them that are in this run.

        Raises FingerprintError when one of them refuses. A contact that serves no run yet, or does not answer in
        `timeout` seconds, is passed over: matchmaking checks the fingerprint again before any round.
        """
        welcomed = []
        for peer in contacts:
            try:
                welcome = await self._endpoint.call(
                    peer, METHOD, Hello(self._run_id, self._fingerprint), Welcome, timeout=timeout
                )
            except (CallError, NetworkError):
                continue
            self._check(peer, welcome)
            welcomed.append(peer)
        return welcomed

    def _check(self, peer: PeerID, welcome: Welcome) -> None:
        if welcome.run_id != self._run_id:
            raise FingerprintError(
                f"{peer.short} takes part in another run: {welcome.run_id[:MAX_TEXT]!r}, not {self._run_id!r}",
                ["run_id"],
            )
        if welcome.differing:
            keys = ", ".join(map(self._told, welcome.differing[:16]))
            raise FingerprintError(
                f"the run {self._run_id!r} refused this recipe: it differs in {keys}; "
                "use the recipe file that the others use (what a volunteer may choose stands under local:)",
                welcome.differing,
            )

    def _told(self, key: str) -> str:
        mine = f" (here {printable(str(self._values[key]), 60)})" if key in self._values else ""
        return key[:MAX_TEXT] + mine

    def close(self) -> None:
        self._endpoint.withdraw(METHOD)
