"""Finds out whether two peers are in the same run, before they exchange anything else.

The DHT knows no recipes, so a peer that joins shows its fingerprint (one short hash for each recipe key that must
agree) to its first contacts. A contact answers with the keys that differ; hashes travel, never values.

A peer leaves again if all contacts that it reaches refuse it, so one liar among several stops nobody. A newcomer that
no contact has answered goes by the majority of networks that it sees. A peer that begins a run, has been taken in, or
has a state of this very recipe stays, whatever strangers say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmcli.errors import CallError, FingerprintError, NetworkError
from swarmcli.events import MembershipEnded, Noticed, PeerRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.recipe import differing_keys
from swarmcli.version import MAX_VERSION, build, unlike
from swarmcli.words import printable, some

METHOD = "run.hello"
HELLO = "hello.json"  # in a home
MAX_KEYS = 512
MAX_TEXT = 128
ASK_AGAIN = 3.0  # seconds between two questions to peers that did not answer: reports are read as often
NEWCOMER = 60.0  # seconds for which peers other than contacts may refuse a newcomer: by then it has read their reports
MOST_ASKED = 16  # peers at once

Version = Annotated[str, msgspec.Meta(max_length=MAX_VERSION)]


class Hello(msgspec.Struct, frozen=True):
    """A newcomer's run and fingerprint. The home keeps it too, with the state that belongs to them."""

    run_id: str
    fingerprint: dict[str, str]
    version: Version = ""  # of swarm; "": from before 0.2

    def is_of_home(self, home: Path, values: Mapping[str, Any], way: str) -> bool:
        """Whether the home says that its state is of this recipe. Raises FingerprintError if the state is of another
        recipe: it would be a second run of this name, which all others refuse. Arguments: see Admission."""
        try:
            before = msgspec.json.decode((home / HELLO).read_bytes(), type=Hello)
        except (OSError, msgspec.DecodeError):  # of a version before 0.2, or torn by a power cut
            return False
        differing = differing_keys(self.fingerprint, before.fingerprint)
        # A home may see several runs. Another protocol may change all hashes: a run is upgraded as a whole.
        if differing and {"run_id", "protocol"}.isdisjoint(differing):
            said = refusal(differing, before.version, values, way)
            raise FingerprintError(f"{home} holds a state of the run {self.run_id!r}: {said}", differing)
        return not differing


class Welcome(msgspec.Struct, frozen=True):
    """The answer: `differing` is empty when the newcomer may join."""

    run_id: str
    differing: list[str]
    version: Version = ""


class Admission:
    """Answers newcomers and asks first contacts, for one run."""

    def __init__(
        self, endpoint: Endpoint, hello: Hello, values: Mapping[str, Any] | None = None, way: str = ""
    ) -> None:
        """`values`: this peer's own, by the keys of the fingerprint; when it is refused it is told them. `way`: how it
        could be a run of its own, in words."""
        self.welcomed = set[PeerID]()
        self._endpoint, self._hello = endpoint, hello
        self._values, self._way = values or {}, way
        self._refusals: dict[PeerID, FingerprintError] = {}
        self.tasks = TaskOwner()
        endpoint.serve(METHOD, Hello, self._greet)

    async def _greet(self, peer: PeerID, hello: Hello) -> Welcome:
        if hello.run_id != self._hello.run_id:
            self._report(peer, f"it asked for the run {hello.run_id[:MAX_TEXT]!r}")
            return Welcome(self._hello.run_id, ["run_id"], build())
        theirs = {key[:MAX_TEXT]: value for key, value in list(hello.fingerprint.items())[:MAX_KEYS]}
        differing = differing_keys(self._hello.fingerprint, theirs)
        if differing:
            versions = "" if hello.version == build() else f"; it uses swarm {hello.version or 'older than 0.2'}"
            self._report(peer, f"its recipe differs in {some(differing, 8)}{versions}")
        return Welcome(self._hello.run_id, differing[:MAX_KEYS], build())

    def _report(self, peer: PeerID, reason: str) -> None:
        self._endpoint.events.emit(PeerRefused(peer.text, printable(reason, 600), what="recipe"))

    async def ask(self, contacts: Iterable[PeerID], *, named: bool = True) -> list[PeerID]:
        """Shows the fingerprint to every contact; returns the contacts that are in this run.

        Raises FingerprintError when all refuse. Contacts that are not `named` by the user may be of other runs, and
        then do not count. A contact that serves no run yet, or does not answer in 5 seconds, is passed over:
        `keep_asking` asks it again, and matchmaking checks the fingerprint before any round.
        """
        asked = list(contacts)
        await asyncio.gather(*(self._ask(peer, named=named) for peer in asked))
        if refused := self._refused_by(asked):
            if len(refused) == len(asked):
                raise refused[0]
            text = f"of {len(asked)} contacts {len(refused)} take this peer for one of another run: {refused[0]}"
            self._endpoint.events.emit(Noticed("warning", text))
        return [peer for peer in asked if peer in self.welcomed]

    async def keep_asking(
        self, contacts: Collection[PeerID], others: Callable[[], Iterable[PeerID]], then: Callable[[], object]
    ) -> None:
        """Asks until some peer has taken this one in, and then calls `then`. Or it emits MembershipEnded: if all
        contacts that are connected refuse this peer or, in its first minute, if most networks of the `others`, who have
        reports in the run, do."""
        began, network, connected = loop_time(), self._endpoint.prefix, self._endpoint.is_connected
        while not self.welcomed:
            await asyncio.sleep(ASK_AGAIN)
            seen = [*filter(connected, others())] if loop_time() - began < NEWCOMER else []
            known = [*filter(connected, contacts)]
            due = [peer for peer in (*known, *seen) if peer not in self._refusals]
            await asyncio.gather(*map(self._ask, due[:MOST_ASKED]))
            refusing = {network(peer) for peer in seen if peer in self._refusals}
            most = 2 * len(refusing) > len({*map(network, seen)})
            refused = self._refused_by([*seen, *known] if most else known)
            if refused and (most or len(refused) == len(known)) and not self.welcomed:
                self._endpoint.events.emit(MembershipEnded(str(refused[0])))
                return
        then()

    async def _ask(self, peer: PeerID, *, named: bool = False) -> None:
        try:
            welcome = await self._endpoint.call(peer, METHOD, self._hello, Welcome, timeout=5.0)
        except (CallError, NetworkError):
            return
        run_id, differing = self._hello.run_id, welcome.differing
        if welcome.run_id != run_id:
            text = f"{peer.short} takes part in another run: {welcome.run_id[:MAX_TEXT]!r}, not {run_id!r}"
            self._refusals |= {peer: FingerprintError(text, ["run_id"])} if named else {}
        elif differing:
            said = refusal(differing, welcome.version, self._values, self._way)
            self._refusals[peer] = FingerprintError(f"the run {run_id!r} refused this peer: {said}", differing)
        else:
            self.welcomed.add(peer)

    def _refused_by(self, peers: Iterable[PeerID]) -> list[FingerprintError]:
        return [self._refusals[peer] for peer in peers if peer in self._refusals]

    async def close(self) -> None:
        self._endpoint.withdraw(METHOD)
        await self.tasks.close()


def refusal(differing: Sequence[str], version: str, values: Mapping[str, Any], way: str) -> str:
    """Says in which keys a recipe with these `values` differs from the one of a peer with this `version` of swarm, and
    what helps: `way`, or the same version if theirs are unlike."""

    def told(key: str) -> str:
        return printable(key, MAX_TEXT) + (f" (here {printable(str(values[key]), 60)})" if key in values else "")

    keys = f"the recipe differs in {some(list(map(told, differing)), 8)}"
    if versions := unlike(version):
        return versions if "protocol" in differing else "; ".join(filter(None, (versions, keys, way)))
    return f"{keys}; take that of the others (only what stands under local: is yours to choose){way and ', or '}{way}"
