"""Checks of a run: its recipe, its first contacts layer by layer, whether its model and data fit this computer.

They ask as `swarm join` does, by the same code, and join nothing: a contact is greeted and asked, an invitation is
shown and not taken up.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarmcli.cli.doctor.finding import Context, Finding, of_error
from swarmcli.clock import MAX_OFFSET, Clock
from swarmcli.errors import (
    AddressError,
    BootstrapError,
    ConnectError,
    DataError,
    FingerprintError,
    IdentityError,
    MembershipError,
    NetworkError,
    NotAMember,
    RecipeError,
    SwarmError,
    WrongPeerError,
)

if TYPE_CHECKING:
    from swarmcli.run.asking import Visitor

CONTACT_SECONDS = 10.0  # for all that is asked of one contact
CLOCK_SECONDS = 5.0  # for its answer to the ping with which a connection begins, which tells its clock
MOST_CONTACTS = 16
OFF_SECONDS = 30.0  # of the clock: the swarm corrects it, but hours and ends of invitations come at other times
LAYERS = ("name", "TCP", "TLS", "identity", "version", "invitation", "recipe")
OFFLINE = "this computer has no network that leads there: see that it is online"
FIXES = {
    "name": "see that this computer is online and that its name server works; or ask for a link with another address",
    "TCP": "the computer there may be off, or its peer has ended: ask for another link (`swarm link` prints it there); "
    "if no contact answers, a firewall here may be in the way: `swarm netcheck`",
    "TLS": "another program answers there, or something in between, such as a proxy or a hotel's login page: ask for a "
    "new link, or try another network",
    "identity": "ask for a new link: the peer that this one names is not there any more",
    "version": "update the older one: the page /join of the run has the line that installs its version",
    "invitation": "ask the owner of the run for a link with an invitation (`swarm invite`)",
    "recipe": "use the recipe file that the others use, or join by a link, which brings it",
}


def check_recipe(context: Context) -> Iterator[Finding]:
    """A file is read and checked; a link is read, and its invitation must not have ended."""
    from swarmcli.recipe import is_link, load_recipe

    if not context.target:
        return
    if is_link(context.target):
        yield from _check_link(context)
        return
    try:
        context.recipe = load_recipe(context.target, context.overrides)
    except RecipeError as error:
        for line in str(error).splitlines():
            yield of_error("recipe", RecipeError(line))
        return
    yield Finding("recipe", "OK", f"{context.target} is in order, run {context.recipe.run_id}")


def _check_link(context: Context) -> Iterator[Finding]:
    from swarmcli.cli.linking import check_not_ended, chosen
    from swarmcli.peer.linked import LinkedRun
    from swarmcli.recipe import parse_link

    try:
        context.link = link = parse_link(context.target)
    except AddressError as error:
        yield of_error("link", error)
        return
    run = LinkedRun(link)
    yield Finding("link", "OK", f"leads to {link.named} in the run {link.run_id}")
    if link.ticket is not None:
        try:
            check_not_ended(link.ticket)
            yield Finding("invitation", "OK", "the link carries one that still holds")
        except MembershipError as error:
            yield of_error("invitation", error)
    kept = run.kept()
    context.downloaded = kept is not None
    if kept is not None:
        try:
            context.recipe = chosen(run, kept, context.overrides)
        except RecipeError as error:
            yield of_error("recipe", error)


def check_names(context: Context) -> Iterator[Finding]:
    """Whether the names of first contacts lead anywhere. Numbers need no name server."""
    from swarmcli.network.addresses import parse_address, scope_of

    names = {}
    for address in _contacts(context):
        try:
            place = parse_address(address)
        except AddressError as error:
            yield of_error("names", error)
            continue
        if place.scheme == "tcp" and scope_of(place.host) is None:
            names[place.host] = place.port
    for name, port in names.items():
        try:
            found = {each[4][0] for each in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}
        except OSError as error:
            yield Finding("names", "FAIL", f"{name} cannot be resolved: {error.strerror or error}", FIXES["name"])
        else:
            yield Finding("names", "OK", f"{name} is {', '.join(sorted(map(str, found)))}")


def _contacts(context: Context) -> list[str]:
    """Whom a peer of the run would dial first."""
    own = list(context.peers)
    if context.link is not None:
        return [*own, *context.link.addresses][:MOST_CONTACTS]
    # As `swarm join` has it: named ones stand in for those of the recipe.
    return (own or list(context.recipe.network.initial_peers if context.recipe is not None else ()))[:MOST_CONTACTS]


def check_contacts(context: Context) -> Iterator[Finding]:
    """Each first contact, from its name up to its recipe, and what their clocks say of this one."""
    addresses = _contacts(context)
    if not addresses:
        if context.recipe is not None:
            yield Finding(
                "contacts", "SKIP", "the recipe names none: a peer joins one beside it, or begins a network of its own"
            )
        return
    try:
        visitor = _visitor(context)
    except (MembershipError, IdentityError) as error:
        in_use = "in use" in str(error)  # by this user's peer of the run: then it is in the run already
        yield of_error("invitation", error, outcome="SKIP" if in_use else "FAIL", otherwise=FIXES["invitation"])
        if in_use:
            yield Finding("contacts", "SKIP", "your own peer of this closed run has them; `swarm status` asks it")
        return
    from swarmcli.network.loop_thread import LoopThread

    thread = LoopThread.acquire()
    try:
        found, offsets = thread.run(_meet_all(context, addresses, visitor))
    finally:
        thread.release()
    context.reached = any(each.outcome == "OK" for each in found)
    # One of several that does not answer keeps nobody from joining.
    yield from (
        Finding(each.check, "WARN", each.text, each.fix) if context.reached and each.outcome == "FAIL" else each
        for each in found
    )
    if offsets:
        yield clock_finding(statistics.median(offsets))
    elif context.reached:
        yield Finding("clock", "SKIP", "no contact has told its own")


def _visitor(context: Context) -> Visitor | None:
    """Who asks: of an open run nobody in particular."""
    from swarmcli.owner.invitations import of_recipe
    from swarmcli.peer.linked import LinkedRun

    if context.link is not None:
        return LinkedRun(context.link).visitor()
    return of_recipe(context.recipe) if context.recipe is not None and context.recipe.access == "invite" else None


async def _meet_all(
    context: Context, addresses: Sequence[str], visitor: Visitor | None
) -> tuple[list[Finding], list[float]]:
    """Strangers are met at the same time; as one peer, a visitor, only one after the other."""
    from swarmcli.network.identity import Identity

    met = []
    if visitor is None:
        met = list(await asyncio.gather(*(_meet(context, each, Identity.generate(), None) for each in addresses)))
    else:
        try:
            met = [await _meet(context, each, visitor.identity, visitor.membership) for each in addresses]
        finally:
            visitor.identity.close()
    return [finding for finding, _ in met], [offset for _, offset in met if offset is not None]


class _WatchedClock(Clock):
    """Keeps the last offset of a contact's clock, also one that the swarm would take for broken."""

    measured: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    def observe(self, peer: bytes, sent: float, received: float, replied: float, returned: float, **how: Any) -> None:
        self.measured = ((received - sent) + (replied - returned)) / 2
        self.told.set()
        super().observe(peer, sent, received, replied, returned, **how)


async def _meet(context: Context, address: str, identity: Any, membership: Any) -> tuple[Finding, float | None]:
    """One contact by one address, and by how much its clock is ahead."""
    from swarmcli.network.endpoint import Endpoint
    from swarmcli.network.transports.tcp.transport import TCPTransport

    clock = _WatchedClock()
    endpoint = Endpoint(TCPTransport(identity), client_mode=True, membership=membership, clock=clock)
    began = time.monotonic()
    try:
        await endpoint.start()
        peer = await endpoint.connect(address, timeout=CONTACT_SECONDS)
        took = 1000 * (time.monotonic() - began)
        with suppress(TimeoutError):
            await asyncio.wait_for(clock.told.wait(), CLOCK_SECONDS)
        same = await _has_same_recipe(context, endpoint, peer)
    except (NetworkError, FingerprintError) as error:
        return _broken(address, error), clock.measured
    finally:
        await endpoint.close()
    rest = "" if same is None else ", the same recipe" if same else ", but it does not say whether it is in the run"
    closed = "" if membership is None else ", the invitation holds"
    well = f"{_place(address)} answers in {took:.0f} ms: TCP, TLS, its identity, its version{closed}{rest}"
    return Finding("contact", "OK", well), clock.measured


async def _has_same_recipe(context: Context, endpoint: Any, peer: Any) -> bool | None:
    """None: there is no recipe to show, as with a link that nobody has joined by; `check_offer` asks for that one.
    Raises FingerprintError."""
    from swarmcli.peer.admission import Admission
    from swarmcli.recipe import fingerprint_of

    if context.recipe is None:
        return None
    fingerprint = await asyncio.to_thread(fingerprint_of, context.recipe)  # it may read the tokenizer's files
    return bool(await Admission(endpoint, context.recipe.run_id, fingerprint).ask([peer]))


def _broken(address: str, error: Exception) -> Finding:
    layer = layer_of(error)
    passed = [each for each in LAYERS[1 : LAYERS.index(layer)] if each != "invitation"]
    well = f"{' and '.join(passed)} {'is' if len(passed) == 1 else 'are'} well; " if passed else ""
    said = str(error).removeprefix(f"{address}: ").removeprefix("connect failed: ").partition("; ")[0]
    fix = OFFLINE if _has_no_way(error) else FIXES[layer]
    return Finding("contact", "FAIL", f"{_place(address)}: {well}{layer}: {said}", fix)


def _has_no_way(error: BaseException | None) -> bool:
    """Whether it is this computer that has no network which leads there."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL):
            return True
        error = error.__cause__
    return False


def _place(address: str) -> str:
    """Host and port, and how people call the peer."""
    from swarmcli.network.addresses import format_address, parse_address

    try:
        found = parse_address(address)
    except AddressError:
        return address
    place = format_address(replace(found, peer_id=None)).partition("://")[2]
    return place + (f" ({found.peer_id.short})" if found.peer_id is not None else "")


def layer_of(error: Exception) -> str:
    """How far a dial came, as one of LAYERS."""
    from swarmcli.network.transports.tcp.handshake import Refused

    match error:
        case FingerprintError():
            return "recipe"
        case NotAMember():
            return "invitation"
        case WrongPeerError():
            return "identity"
        case ConnectError(step="name resolution"):
            return "name"
        case ConnectError(step="connect"):
            return "TCP"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Refused) and cause.rule == "another version":
            return "version"
        cause = cause.__cause__
    return "TLS"


def clock_finding(ahead: float) -> Finding:
    """`ahead`: seconds that the contacts' clocks are ahead of this one."""
    off = abs(ahead)
    if off < 1:
        return Finding("clock", "OK", "goes as that of the contacts")
    text = f"this computer's clock is {off:,.0f} s {'behind' if ahead > 0 else 'ahead of'} the contacts'"
    fix = "set the clock, and switch on setting it by the network"
    if off < OFF_SECONDS:
        return Finding("clock", "OK", f"{text}, which the swarm corrects")
    return Finding("clock", "FAIL" if off > MAX_OFFSET else "WARN", text, fix)


def check_offer(context: Context) -> Iterator[Finding]:
    """Whether the peer of a link hands out the very recipe that the link speaks of."""
    from swarmcli.cli.linking import chosen
    from swarmcli.peer.linked import LinkedRun
    from swarmcli.peer.offering import fetch_recipe

    if context.link is None or not context.reached:
        return
    run = LinkedRun(context.link)
    try:
        recipe, _ = fetch_recipe(context.link, run.path)
        if context.recipe is None:
            context.recipe = chosen(run, run.text_of(recipe), context.overrides)
    except (FingerprintError, RecipeError, MembershipError) as error:
        yield of_error("recipe", error, fix="ask for a new link; the one that you have is of another run or recipe")
    except (BootstrapError, SwarmError) as error:
        yield of_error("recipe", error)
    else:
        yield Finding("recipe", "OK", f"the contact hands out the recipe of {context.link.run_id} that the link names")


def check_memory(context: Context) -> Iterator[Finding]:
    """Whether this computer has the memory that a trainer of the run takes, and has it free."""
    if context.recipe is None:
        return
    from swarmcli.peer.collaboration import compute_of
    from swarmcli.training import memory
    from swarmcli.training.outline import outline_of

    try:
        compute = compute_of(context.recipe, "trainer")
        outline = outline_of(context.recipe)
        told = memory.check_memory(context.recipe, outline, "trainer", compute, now=False)
    except RecipeError as error:
        yield of_error("memory", error)
        return
    try:
        memory.check_memory(context.recipe, outline, "trainer", compute)
    except RecipeError:
        fix = "close other programs before you join, or help with `swarm aux`, which needs less"
        yield Finding("memory", "WARN", f"a trainer takes about {told}, and less is free at the moment", fix)
    else:
        yield Finding("memory", "OK", f"a trainer takes about {told}")


def check_data(context: Context) -> Iterator[Finding]:
    """Draws the first batch."""
    if context.recipe is None:
        return
    if not context.downloaded:
        yield Finding("data", "SKIP", "nothing is downloaded before you join")
        return
    from swarmcli.training import build_task

    try:
        batch = next(build_task(context.recipe).batches(context.recipe.seed))
    except (DataError, RecipeError) as error:
        yield of_error("data", error)
        return
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
    yield Finding("data", "OK", f"the first batch was drawn: {shapes}")


def check_network(context: Context) -> Iterator[Finding]:
    """Whether others can dial this computer, and how fast its link is. It takes part for a moment, as netcheck does."""
    if not context.network:
        yield Finding("reach", "SKIP", "takes up to a minute; --network looks whether others can dial this computer")
        return
    from swarmcli.cli.netcheck import find, options_of

    if context.target and not context.reached:
        yield Finding("reach", "SKIP", "no contact of the run answers, so nobody can tell")
        return
    found = find(options_of(context.target or None, context.peers))
    alone = found.listening == () or "no network" in found.sentence
    yield Finding("reach", "WARN" if alone else "OK", found.sentence, "connect it to a network" if alone else "")
    for peer in found.peers:
        if peer.down is not None and peer.up is not None:
            yield Finding(
                "rates", "OK", f"{8e-6 * peer.down:.0f} Mbit/s down, {8e-6 * peer.up:.0f} Mbit/s up with {peer.peer}"
            )
