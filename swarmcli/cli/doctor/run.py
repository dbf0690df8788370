"""Checks of a run: its recipe, and its first contacts layer by layer.

They ask as `swarm join` does, by the same code, and join nothing: a contact is greeted and asked, an invitation is
shown and not taken up.
"""

from __future__ import annotations

import asyncio
import errno
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarmcli.cli.doctor.finding import Context, Finding
from swarmcli.cli.doctor.network import contacts_of
from swarmcli.clock import MAX_OFFSET, Clock
from swarmcli.errors import (
    ConnectError,
    FingerprintError,
    IdentityError,
    MembershipError,
    NetworkError,
    NotAMember,
    WrongPeerError,
)
from swarmcli.network.addresses import parse_address, place_of
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity
from swarmcli.network.loop_thread import LoopThread
from swarmcli.network.transports.tcp.handshake import Refused
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.peer.linked import LinkedRun, visitor_of
from swarmcli.version import build
from swarmcli.words import format_duration

if TYPE_CHECKING:
    from swarmcli.network.membership import Membership
    from swarmcli.run.asking import Visitor

    Met = tuple[Finding, float | None]  # one contact, and by how many seconds its clock is ahead

CONTACT_SECONDS = 10.0  # for all that is asked of one contact
CLOCK_SECONDS = 5.0  # for its answer to the ping with which a connection begins, which tells its clock
MOST_CONTACTS = 16
# the clock may be off by so much: the swarm corrects it, but hours and ends of invitations come at other times
OFF_SECONDS = 30.0
NOWHERE = (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
OFFLINE = "this computer has no network that leads there: see that it is online"
FIXES = {  # by layer, in the order in which a dial passes them
    "name": "see that this computer is online and that its name server works; or ask for a link with another address",
    "TCP": "the computer there may be off, or its peer has ended: ask for another link (`swarm link` prints it there); "
    "if no contact answers, a firewall here may be in the way: `swarm doctor --network`",
    "TLS": "another program answers there, or something in between, such as a proxy or a hotel's login page: ask for a "
    "new link, or try another network",
    "identity": "ask for a new link: the peer that this one names is not there any more",
    "version": "update the older one: the page /join of the run has the line that installs its version",
    "invitation": "ask the owner of the run for a link with an invitation (`swarm invite`)",
    "recipe": "use the recipe file that the others use, or join by a link, which brings it",
}


def check_recipe(context: Context) -> Iterator[Finding]:
    """A file is read and checked; a link is read, and its invitation must not have ended."""
    from swarmcli.cli.linking import check_not_ended, recipe_kept
    from swarmcli.recipe import is_link, load_recipe, parse_link

    if context.target and not is_link(context.target):
        context.recipe = load_recipe(context.target, context.overrides)
        yield Finding("recipe", "OK", f"{context.target} is in order, run {context.recipe.run_id}")
    elif context.target:
        context.link = link = parse_link(context.target)
        yield Finding("link", "OK", f"leads to {link.named} in the run {link.run_id}")
        kept = recipe_kept(LinkedRun(link), context.overrides)
        context.recipe = kept[1] if kept is not None else None
        if link.ticket is not None:
            check_not_ended(link.ticket)
            yield Finding("invitation", "OK", "the link carries one that still holds")


def check_contacts(context: Context) -> Iterator[Finding]:
    """Checks each first contact, from its name up to its recipe, and what the contacts' clocks say of this one."""
    if not (context.link or context.recipe or context.peers):
        return
    contacts = contacts_of(context)[:MOST_CONTACTS]
    try:
        visitor = visitor_of(context.link or context.recipe)
    except (MembershipError, IdentityError) as error:
        if "in use" not in str(error):
            raise
        # By this user's peer of the run: then it is in the run already.
        text = "not asked: your own peer is in this closed run; `swarm status` shows how it does"
        yield Finding("contacts", "SKIP", text)
        return
    thread = LoopThread.acquire()
    try:
        met = thread.run(_meet_all(context, contacts, visitor))
    finally:
        thread.release()
    context.reached = any(finding.outcome == "OK" for finding, _ in met)
    for finding, _ in met:
        # One of several that does not answer keeps nobody from joining.
        warns = context.reached and finding.outcome == "FAIL"
        yield replace(finding, outcome="WARN") if warns else finding
    if offsets := [offset for _, offset in met if offset is not None]:
        yield clock_finding(statistics.median(offsets))
    elif context.reached:
        yield Finding("clock", "SKIP", "no contact has told its own")
    elif context.recipe is not None and not met:
        text = "the recipe names none: a peer joins one on the same computer, or begins a network of its own"
        yield Finding("contacts", "SKIP", text)


async def _meet_all(context: Context, addresses: Sequence[str], visitor: Visitor | None) -> list[Met]:
    """Strangers are met at the same time; as one peer, a visitor, only one after the other."""
    if visitor is None:
        return await asyncio.gather(*(_meet(context, each, Identity.generate(), None) for each in addresses))
    try:
        return [await _meet(context, each, visitor.identity, visitor.membership) for each in addresses]
    finally:
        visitor.identity.close()


class _WatchedClock(Clock):
    """Tells the offset of a contact's clock, also one that the swarm would take for broken."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = asyncio.get_running_loop().create_future()

    def observe(self, peer: bytes, sent: float, received: float, replied: float, returned: float, **how: Any) -> None:
        if not self.ahead.done():
            self.ahead.set_result(((received - sent) + (replied - returned)) / 2)
        super().observe(peer, sent, received, replied, returned, **how)


async def _meet(context: Context, address: str, identity: Identity, membership: Membership | None) -> Met:
    """One contact by one address."""
    from swarmcli.peer.admission import Admission, Hello
    from swarmcli.recipe import fingerprint_of

    clock, ahead = _WatchedClock(), None
    endpoint = Endpoint(TCPTransport(identity), client_mode=True, membership=membership, clock=clock)
    began, place = time.monotonic(), parse_address(address)
    called = place_of(address)
    if place.peer_id is not None:
        called += f" ({place.peer_id.short})"
    try:
        await endpoint.start()
        peer = await endpoint.connect(address, timeout=CONTACT_SECONDS)
        passed = f"answers in {format_duration(time.monotonic() - began)}: TCP, TLS, its identity, its version"
        if membership is not None:
            passed += ", the invitation holds"
        with suppress(TimeoutError):
            ahead = await asyncio.wait_for(clock.ahead, CLOCK_SECONDS)
        if context.recipe is not None:  # that of a link which nobody has joined by, `check_offer` asks for
            fingerprint = await asyncio.to_thread(fingerprint_of, context.recipe)  # it may read the tokenizer's files
            same = await Admission(endpoint, Hello(context.recipe.run_id, fingerprint, build())).ask([peer])
            passed += ", the same recipe" if same else ", but it does not say whether it is in the run"
        return Finding("contact", "OK", f"{called} {passed}"), ahead
    except (NetworkError, FingerprintError) as error:
        said, fix = _broken(address, error)
        return Finding("contact", "FAIL", f"{called}: {said}", fix), ahead
    finally:
        await endpoint.close()


def _broken(address: str, error: Exception) -> tuple[str, str]:
    """How far a contact was reached, and what helps."""
    causes: list[BaseException | None] = [error]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    match error:
        case FingerprintError():
            layer = "recipe"
        case NotAMember():
            layer = "invitation"
        case WrongPeerError():
            layer = "identity"
        case ConnectError(step="name resolution"):
            layer = "name"
        case ConnectError(step="connect"):
            layer = "TCP"
        case _:
            refused = any(isinstance(each, Refused) and each.rule == "another version" for each in causes)
            layer = "version" if refused else "TLS"
    passed = [each for each in [*FIXES][1 : [*FIXES].index(layer)] if each != "invitation"]
    well = f"{' and '.join(passed)} {'is' if len(passed) == 1 else 'are'} well; " if passed else ""
    said = str(error).removeprefix(f"{address}: ").removeprefix("connect failed: ").partition("; ")[0]
    said = said.replace("name resolution failed", f"{parse_address(address).host} cannot be resolved")
    offline = any(isinstance(each, OSError) and each.errno in NOWHERE for each in causes)
    return f"{well}{layer}: {said}", OFFLINE if offline else FIXES[layer]


def clock_finding(ahead: float) -> Finding:
    """`ahead`: seconds that the contacts' clocks are ahead of this one."""
    off = abs(ahead)
    if off < 1:
        return Finding("clock", "OK", "agrees with the contacts' clocks")
    text = f"this computer's clock is {format_duration(off)} {'behind' if ahead > 0 else 'ahead of'} the contacts'"
    if off < OFF_SECONDS:
        return Finding("clock", "OK", f"{text}, which the swarm corrects")
    fix = "set the clock, and let the network set it from now on"
    return Finding("clock", "FAIL" if off > MAX_OFFSET else "WARN", text, fix)


def check_offer(context: Context) -> Iterator[Finding]:
    """Whether the peer of a link that nobody has joined by here hands out the very recipe that the link speaks of."""
    if context.link is None or context.recipe is not None or not context.reached:
        return
    from swarmcli.peer.offering import fetch_recipe

    fetch_recipe(context.link, LinkedRun(context.link).path)
    yield Finding("recipe", "OK", f"the contact hands out the recipe of {context.link.run_id} that the link names")
