"""The owner of a closed run at the command line, while the run goes on: it looks which peers take part, and revokes.

The owner's command is a member for a moment, by an invitation that it signs itself. It computes nothing and does not
listen. Beside the run key there is a ledger of what that key has signed, so that an invitation can be revoked by its
number or its note, and so that each later command tells of a revocation again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from swarmcli.dht import DHT, DHTNode
from swarmcli.errors import MembershipError, NetworkError, UsageError
from swarmcli.network.identity import PEER_ID_BYTES, PeerID
from swarmcli.network.membership import ID_BYTES, Invitation, Membership, Remembered, Revocation
from swarmcli.owner.invitations import key_file, write_private
from swarmcli.owner.revocations import METHOD, Revocations, Revoked, Taken
from swarmcli.recipe import Recipe, digest_of
from swarmcli.recipe.run_key import RunKey
from swarmcli.run.asking import AskedTables, VisitorReport, ask_for_tables
from swarmcli.run.asking import reports as read_reports

SHORTEST = 6  # characters by which a peer or an invitation may be named

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Invited:
    """An invitation that was made here."""

    id: str
    until: int
    peer: str = ""  # the peer that it is for; "": a bearer
    note: str = ""


@dataclass(slots=True)
class InvitationLedger:
    """A file beside the run key (mode 0600) with what that key has signed. It holds no secret of an invitation."""

    file: Path
    invited: list[Invited] = field(default_factory=list)
    # subjects; each command signs them again, for the recipe as it is then
    revoked: list[str] = field(default_factory=list)

    @classmethod
    def beside(cls, key: Path) -> InvitationLedger:
        """Reads the ledger. Raises UsageError if it cannot be read: invitations that it forgets could not be revoked by
        name."""
        file = key.with_name(f"{key.name}.ledger")
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            return cls(file, [Invited(**each) for each in values["invited"]], list(values["revoked"]))
        except FileNotFoundError:
            return cls(file)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{file} cannot be read; restore it, or move it away to begin a new one") from error

    def note(self, invitation: Invitation, *, peer: PeerID | None, note: str) -> None:
        whom = peer.text if peer is not None else ""
        self.invited.append(Invited(invitation.id.hex(), invitation.until, whom, note))
        self._write()

    def revoke(self, subject: bytes) -> None:
        self.revoked = list(dict.fromkeys([*self.revoked, subject.hex()]))
        self._write()

    def _write(self) -> None:
        values = {"invited": [asdict(each) for each in self.invited], "revoked": self.revoked}
        write_private(self.file, json.dumps(values, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class RunMember:
    """A peer of a closed run, as the owner's command has found it. Its texts are the peer's own."""

    peer: str
    name: str = ""
    role: str = ""
    epoch: int = 0
    invitation: str = ""  # the invitation that it has shown; "": this command could not reach it
    until: int = 0
    ended: str = ""  # why it is no member any more


def load_key(recipe: Recipe, file: Path | None) -> tuple[RunKey, Path]:
    """Returns the run's key and its file. Raises UsageError for an open run, IdentityError for a key that cannot be
    used, MembershipError for another run's key."""
    if recipe.access == "open":
        raise UsageError(
            f"the run {recipe.run_id} is open: whoever has its link takes part (`swarm link`); a closed one says "
            "access: invite, and `swarm init --invite` begins one"
        )
    path = file or key_file(recipe)
    key = RunKey.load(path)
    if key.public.text != recipe.run_key:
        raise MembershipError(f"{path} is the key of another run: run_key of this one is {recipe.run_key}")
    return key, path


class Visit:
    """The owner's command as a member of the run, while `do` lasts."""

    def __init__(self, recipe: Recipe, key: RunKey, ledger: InvitationLedger, contacts: Sequence[str]) -> None:
        self.recipe = recipe
        self.key = key
        self.ledger = ledger
        self._contacts = contacts

    def do(self, action: Callable[[DHTNode, Membership], Awaitable[T]]) -> T:
        """Runs `action` as a member. Raises BootstrapError when no contact answers."""
        dht = DHT(self._contacts, start=False, client_mode=True, port_mapping=False, startup_timeout=15.0)
        try:
            digest = digest_of(self.recipe)
            card = self.key.invite(digest, dht.peer_id, int(time.time()) + 3600)
            known = {each.subject: each for each in self.revocations}
            membership = Membership(
                self.key.run(digest), dht.identity, Remembered(card=card, revoked=known), dht.clock.now
            )
            dht.membership = membership
            dht.run_in_background()
            return dht.run_coroutine(lambda _, node: action(node, membership))
        finally:
            dht.shutdown()

    @property
    def revocations(self) -> list[Revocation]:
        digest = digest_of(self.recipe)
        return [self.key.revoke(digest, bytes.fromhex(subject)) for subject in self.ledger.revoked]

    async def members(self, node: DHTNode, membership: Membership) -> list[RunMember]:
        """Returns the peers that report to the run now, each with the invitation that it has shown to this command."""
        reports = dict(list((await read_reports(node, self.recipe.run_id)).items())[:1000])
        everybody = list(dict.fromkeys((*reports, *node.endpoint.connected())))

        async def meet(peer: PeerID) -> None:
            report = reports.get(peer)
            if report is not None:
                node.endpoint.learn(peer, report.addresses)
            with suppress(NetworkError, ValueError):  # only the greeting before the answer matters
                # A relay may be needed to dial it.
                await node.endpoint.call(peer, METHOD, Revoked(()), Taken, timeout=8.0)

        await asyncio.gather(*map(meet, everybody))
        return [_member(peer, reports.get(peer), membership) for peer in everybody]

    async def tell(self, node: DHTNode, membership: Membership) -> int:
        """Tells all members that this command is connected with about all revocations; returns how many know them."""
        revocations = Revocations(node.endpoint, membership)
        try:
            return len(await revocations.tell(node.endpoint.connected(), self.revocations))
        finally:
            await revocations.close()

    async def revoke(self, words: Sequence[str], node: DHTNode, membership: Membership) -> tuple[list[bytes], int]:
        """Revokes what these words name; returns the subjects, and how many members were told. Raises UsageError."""
        members = await self.members(node, membership)
        subjects = [subject_named(word, self.ledger, members) for word in words]
        for subject in subjects:  # first into the ledger: if no peer is reached now, the next command tells the peers
            self.ledger.revoke(subject)
        return subjects, await self.tell(node, membership)

    async def look(self, node: DHTNode, membership: Membership) -> list[RunMember]:
        """Returns the members that take part; also tells everybody about revocations."""
        members = await self.members(node, membership)
        await self.tell(node, membership)
        return members

    async def look_with_tables(self, node: DHTNode, membership: Membership) -> tuple[list[RunMember], AskedTables]:
        """The same, and what each member has given."""
        return await self.look(node, membership), await ask_for_tables(node, self.recipe.run_id)


def subject_named(word: str, ledger: InvitationLedger, members: Sequence[RunMember]) -> bytes:
    """Returns the subject that a text names: a peer id, the number of an invitation, the beginning of one of the two,
    the name of a peer that takes part, or a note. Raises UsageError if it names nothing, or more than one.

    A peer chooses its own name: a peer named like the note of another's invitation does not stand in for that one.
    """
    for parse in (PeerID.parse, _number):
        try:
            return parse(word)
        except ValueError:
            continue
    begins = len(word) >= SHORTEST
    called = [each for each in members if each.name == word or (begins and each.peer.startswith(word))]
    named: dict[bytes, str] = {PeerID.parse(each.peer): each.peer for each in called}
    noted = dict(_in_ledger(word, begins, ledger))
    if named and all(each.peer in noted.values() or each.invitation in noted.values() for each in called):
        noted = {}  # the notes belong to these very members
    found = named | noted
    if len(found) == 1:
        return next(iter(found))
    if found:
        raise UsageError(f"{word!r} may mean {', '.join(sorted(found.values()))}; write one of them")
    raise UsageError(
        f"no member and no invitation goes by {word!r}; write a peer id, the number of an invitation, or at least "
        f"{SHORTEST} characters of one (`swarm members` lists them)"
    )


def _in_ledger(word: str, begins: bool, ledger: InvitationLedger) -> Iterator[tuple[bytes, str]]:
    for invited in ledger.invited:
        if (word and invited.note == word) or (begins and invited.id.startswith(word)):
            yield bytes.fromhex(invited.id), invited.id
        elif begins and invited.peer.startswith(word):
            yield PeerID.parse(invited.peer), invited.peer


def describe_subject(subject: bytes) -> str:
    return f"the peer {PeerID(subject).text}" if len(subject) == PEER_ID_BYTES else f"the invitation {subject.hex()}"


def _number(word: str) -> bytes:
    number = bytes.fromhex(word)
    if len(number) != ID_BYTES or number.hex() != word:
        raise ValueError
    return number


def _member(peer: PeerID, report: VisitorReport | None, membership: Membership) -> RunMember:
    shown = membership.admitted.get(peer)
    return RunMember(
        peer.text,
        report.name if report else "",
        report.role if report else "",
        report.epoch if report else 0,
        shown.id.hex() if shown else "",
        shown.until if shown else 0,
        "revoked" if peer in membership.remembered.revoked else membership.objection(peer) if shown else "",
    )
