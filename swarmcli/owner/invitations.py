"""A closed run on this computer: the files by which its peers are members.

    <directory of the recipe>/<run id>.run-key   the owner's: who has it needs no invitation
    <directory of the recipe>/invitation         what the link brought that somebody has agreed to join by
    <home of a peer>/membership.json             its pass, whom it bound as a host, and the revocations it knows

All of them have mode 0600. The pass in a home is good for the identity in that home, and for no other.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path

from swarmcli.errors import AddressError, IdentityError, MembershipError
from swarmcli.files.durable import write_file
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.membership import ClosedRun, Membership, Pass, Remembered, Revocation
from swarmcli.recipe import Recipe, digest_of
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.ticket import Ticket
from swarmcli.run.asking import Visitor

MEMBERSHIP = "membership.json"
INVITATION = "invitation"

HOW = "ask its owner for a link with an invitation (`swarm invite`) and join by that"


def key_file(recipe: Recipe) -> Path:
    """Returns where `swarm init` puts the run key, beside the recipe."""
    return recipe.directory / f"{recipe.run_id}.run-key"


def membership_of(
    recipe: Recipe, home: Path, identity: Identity, now: Callable[[], float], *, keep: bool = True
) -> Membership | None:
    """Returns what makes this peer a member of a closed run; None for an open one.

    That is the pass in its home, or the invitation that its link has brought, whichever holds longer; beside the run
    key a peer invites itself. Raises MembershipError if none of them is valid, IdentityError for a key or an invitation
    that cannot be read, and RecipeError.
    """
    if recipe.access == "open":
        return None
    run = run_of(recipe)
    file = home / MEMBERSHIP
    remembered = read_remembered(file)
    # Everyone would refuse a revocation made for the recipe before a change, or by a version with other keys.
    remembered.revoked = {each.subject: each for each in remembered.revoked.values() if each.is_genuine(run)}
    if keep:
        remembered.save = lambda: write_private(file, _dump(remembered))
    cards = [remembered.card, _of_owner(recipe, run, identity, now), _of_link(recipe, run, identity)]
    fitting = [card for card in cards if card is not None and _fits(card, run, identity)]
    good = [card for card in fitting if card.invitation.id not in remembered.revoked]
    if identity.peer_id in remembered.revoked:
        raise MembershipError(
            f"the owner of the run {recipe.run_id} has revoked this peer ({identity.peer_id.short}…); ask the owner"
        )
    if fitting and not good:
        raise MembershipError(f"the owner of the run {recipe.run_id} has revoked this peer's invitation; ask the owner")
    # If two invitations end at the same time, take the one in the home: it may be bound already.
    card = max(good, key=lambda card: card.invitation.until, default=None)
    if card is None:
        raise MembershipError(f"the run {recipe.run_id} is closed, and this peer has no invitation; {HOW}")
    if card.invitation.until <= now():
        raise MembershipError(
            f"the run {recipe.run_id} is closed, and this peer's invitation has ended; {HOW}, or set this computer's "
            "clock if it is wrong"
        )
    if card != remembered.card:
        remembered.card = card
        remembered.save()
    return Membership(run, identity, remembered, now)


def run_of(recipe: Recipe) -> ClosedRun:
    assert recipe.run_key is not None  # the recipe's rules demand it if access is by invitation
    return ClosedRun(PeerID.parse(recipe.run_key), digest_of(recipe))


def of_recipe(recipe: Recipe) -> Visitor:
    """Returns who looks at a closed run from this computer: the holder of the run key, or a peer of the run that does
    not run just now. Raises MembershipError if there is neither, IdentityError for a key that others may read."""
    if key_file(recipe).exists():
        return _visitor(recipe, recipe.directory, Identity.generate())
    why = "this computer has no peer of it; ask its owner for a link with an invitation (`swarm invite`)"
    for file in sorted((recipe.output_dir / recipe.run_id).glob(f"*/{MEMBERSHIP}")):
        try:
            return _visitor(recipe, file.parent, Identity.load_or_create(file.with_name("identity.key")))
        except (IdentityError, MembershipError) as error:
            why = str(error)
    raise MembershipError(f"the run {recipe.run_id} is closed, and nobody here can look at it: {why}")


def _visitor(recipe: Recipe, home: Path, identity: Identity) -> Visitor:
    try:
        membership = membership_of(recipe, home, identity, time.time, keep=False)
    except BaseException:
        identity.close()
        raise
    assert membership is not None
    return Visitor(identity, membership)


def visiting(ticket: Ticket, recipe: str, homes: Path) -> Visitor:
    """Returns who looks at a closed run by a ticket. For a bearer's ticket, it is the key in the link: its host lets
    that key look and binds it to nobody. For a certain peer's, it is that peer, whose identity is in one of the homes.
    Raises MembershipError, IdentityError."""
    identity = ticket.bearer or _identity_of(ticket.invitation.holder, homes)
    remembered = Remembered(card=ticket.card(recipe, identity.peer_id))
    return Visitor(identity, Membership(ticket.run(recipe), identity, remembered, time.time))


def _identity_of(peer: PeerID, homes: Path) -> Identity:
    for file in sorted(homes.glob("*/identity.key")):
        identity = Identity.load_or_create(file)
        if identity.peer_id == peer:
            return identity
        identity.close()
    raise MembershipError(
        f"the invitation of this link is for the peer {peer.short}…, whose identity is not below {homes}; ask the "
        "owner for a link for the bearer (`swarm invite` without --for)"
    )


def keep_ticket(directory: Path, ticket: Ticket) -> None:
    """Writes the ticket down for the peers that begin in this directory. Raises OSError."""
    write_private(directory / INVITATION, ticket.encode())


def read_remembered(file: Path) -> Remembered:
    """Reads what a home holds; nothing if there is no such file. Raises MembershipError for a file that cannot be read:
    a host that went on without what it has bound would bind invitations again."""
    try:
        if file.stat().st_size > 4 << 20:  # all revocations that a peer keeps take two million bytes
            raise ValueError
        values = json.loads(file.read_text(encoding="utf-8"))
        card = Pass.decode(_bytes(values["pass"])) if values["pass"] else None
        bound = {bytes.fromhex(number): PeerID.parse(peer) for number, peer in values["bound"].items()}
        revoked = [Revocation(bytes.fromhex(subject), _bytes(signed)) for subject, signed in values["revoked"].items()]
    except FileNotFoundError:
        return Remembered()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise MembershipError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or 'it is damaged'}); restore it from a backup, "
            "or move this peer's directory away and join by another invitation"
        ) from error
    return Remembered(bound, {each.subject: each for each in revoked}, card)


# Inside


def _of_owner(recipe: Recipe, run: ClosedRun, identity: Identity, now: Callable[[], float]) -> Pass | None:
    file = key_file(recipe)
    if not file.exists():
        return None
    key = RunKey.load(file)
    if key.public != run.key:
        raise MembershipError(
            f"{file} is not the key of this run: the recipe's run_key is {run.key}, the file's {key.public}"
        )
    return key.invite(run.recipe, identity.peer_id, int(now()) + 365 * 86_400)  # made anew at each start


def _of_link(recipe: Recipe, run: ClosedRun, identity: Identity) -> Pass | None:
    file = recipe.directory / INVITATION
    try:
        ticket = Ticket.parse(file.read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"the invitation {file} cannot be read; join by the link again") from error
    except AddressError:
        raise IdentityError(f"the invitation {file} is damaged; join by the link again") from None
    return ticket.card(run.recipe, identity.peer_id)


def _fits(card: Pass, run: ClosedRun, identity: Identity) -> bool:
    """Whether the pass is this run's, and this peer can show it."""
    peer = identity.peer_id
    return card.invitation.is_genuine(run) and (card.invitation.holder == peer or card.is_claimed_by(peer, run))


def _dump(remembered: Remembered) -> str:
    return json.dumps(
        {
            "pass": _text(remembered.card.encode()) if remembered.card else "",
            "bound": {number.hex(): peer.text for number, peer in remembered.bound.items()},
            "revoked": {each.subject.hex(): _text(each.signature) for each in remembered.revoked.values()},
        },
        indent=1,
    )


def write_private(file: Path, text: str) -> None:
    """Writes a file that only this user can read, from the first byte on."""
    write_file(file, text.encode(), private=True)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
