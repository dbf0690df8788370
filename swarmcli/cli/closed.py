"""The verbs of a run's owner: `swarm invite`, `revoke`, `sign` and `members`."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from swarmcli.checkpoints.layout import OWNER, position_of
from swarmcli.cli import contributions
from swarmcli.cli.console import err, out, plain_table
from swarmcli.cli.contributions import Told
from swarmcli.cli.link import links_of
from swarmcli.cli.peers import Overrides, Peers
from swarmcli.cli.which import Which, contacts_of, home_of, link_of, runs_of
from swarmcli.errors import CheckpointError, SwarmError, UsageError
from swarmcli.events import Contribution
from swarmcli.files.durable import write_file
from swarmcli.journal import JOURNAL_NAME, printable
from swarmcli.machine import client
from swarmcli.machine.registry import LocalPeers
from swarmcli.network.identity import PeerID
from swarmcli.owner.invitations import key_file
from swarmcli.owner.visit import InvitationLedger, RunMember, Visit, describe_subject, load_key
from swarmcli.peer.home import LINK
from swarmcli.peer.linked import visitor_of
from swarmcli.recipe import Link, Recipe, digest_of, is_link, load_recipe, parse_link
from swarmcli.recipe.offered import data_in_words, joining
from swarmcli.recipe.run_key import RunKey, is_owners_position
from swarmcli.recipe.ticket import Ticket
from swarmcli.run.asking import ask_for_tables, visit
from swarmcli.words import format_moment, plural

RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe file of the run.")]
KeyFile = Annotated[
    Path | None, typer.Option("--run-key", help="The run key. Default: <run id>.run-key beside the recipe.")
]


def invite(
    recipe: RecipeFile,
    overrides: Overrides,
    peer: Annotated[
        str | None,
        typer.Option("--for", metavar="PEER", help="For this peer id alone. Default: for the first peer that uses it."),
    ] = None,
    days: Annotated[float, typer.Option(help="For how many days it holds.")] = 30.0,
    note: Annotated[str, typer.Option(help="A note for your own list; `swarm revoke` takes it, too.")] = "",
    link: Annotated[
        str | None, typer.Option(help="A link of the run. Default: that of its peer on this computer.")
    ] = None,
    run_key: KeyFile = None,
    copyable: Annotated[
        bool, typer.Option("--copyable", help="Print the link alone, for a clipboard or a pipe.")
    ] = False,
) -> None:
    """Make a link by which somebody joins a closed run.

    \b
    swarm invite my-run.yaml --note Ada
    swarm invite my-run.yaml --note Ada --days 30 --copyable
    """
    loaded = load_recipe(recipe, overrides)
    key, path = load_key(loaded, run_key)
    if not 0 < days <= 3650:
        raise UsageError(f"--days is more than 0 and at most 3650, got {days:g}")
    whom = PeerID.parse(peer) if peer is not None else None
    host = _host_of(loaded, link)
    digest, until = digest_of(loaded), int(time.time() + days * 86_400)
    ledger = InvitationLedger.beside(path)
    if whom is None:
        ticket = Ticket.for_bearer(key.public, *key.invite_bearer(digest, host.peer_id, until))
    else:
        ticket = Ticket(key.public, key.invite(digest, whom, until).invitation)
    ledger.note(ticket.invitation, peer=whom, note=note)
    made = replace(host, ticket=ticket)
    out.print(str(made) if copyable else joining(made, loaded), soft_wrap=True)
    terms = (
        f"for the peer {whom.short}… alone"
        if whom
        else "for the first peer that uses it: send it to one person, in private; the peer "
        f"{host.peer_id.short}… must run when that person joins"
    )
    err.print(f"invitation {ticket.invitation.id.hex()}, until {format_moment(until)}, {terms}")
    if needed := data_in_words(loaded):
        err.print(needed)


def revoke(
    recipe: RecipeFile,
    who: Annotated[
        list[str],
        typer.Argument(metavar="WHO...", help="Peers (id, its beginning, or name) or invitations (number or note)."),
    ],
    overrides: Overrides,
    peer: Peers,
    run_key: KeyFile = None,
) -> None:
    """Take back invitations of a closed run: its members close all connections with those peers.

    \b
    swarm revoke my-run.yaml Ada
    """
    loaded = load_recipe(recipe, overrides)
    key, path = load_key(loaded, run_key)
    visit = Visit(loaded, key, InvitationLedger.beside(path), _contacts_of(loaded, peer))
    with _waiting("telling the members"):
        subjects, told = visit.do(partial(visit.revoke, who))
    for subject in subjects:
        out.print(f"revoked {describe_subject(subject)}")
    err.print(
        f"told {plural(told, 'member')}, who tell the others; within a minute no member is connected to those peers"
        if told
        else "no member could be told yet; the next `swarm members` tells them",
    )


def sign(
    recipe: RecipeFile,
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The directory of the checkpoint.")],
    overrides: Overrides,
    run_key: KeyFile = None,
) -> None:
    """Sign a checkpoint with the run key: peers at an earlier epoch then follow a peer that begins with it.

    \b
    swarm sign my-run.yaml runs/my-run/monitor-1/checkpoints/epoch-000400
    """
    loaded = load_recipe(recipe, overrides)
    if loaded.run_key is None:
        raise UsageError(f"{recipe} names no run_key, so peers could not tell whose signature it is; add one to it")
    key = RunKey.load(run_key or key_file(loaded))
    if key.public.text != loaded.run_key:
        raise UsageError(f"that is the key of another run: run_key of this one is {loaded.run_key}")
    position = position_of(checkpoint, loaded.run_id)
    signature = key.sign_position(digest_of(loaded), *position)
    if not is_owners_position(PeerID.parse(loaded.run_key), signature, digest_of(loaded), *position):
        raise UsageError("the two halves of the run key do not belong together, so its signature would not hold")
    try:
        write_file(checkpoint / OWNER, json.dumps({"signature": signature.hex()}).encode())
    except OSError as error:
        raise CheckpointError(f"{checkpoint / OWNER} cannot be written: {error.strerror}") from error
    out.print(f"signed epoch {position[0]} at {checkpoint}")
    err.print(f"a peer that starts with --resume {checkpoint} now leads all peers at an earlier epoch")


def members(
    overrides: Overrides,
    peer: Peers,
    what: Which = None,
    run_key: KeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Show what each peer has given to a run; to the owner of a closed run also who takes part, by which invitation.

    Examples: swarm members; swarm members recipe.yaml; swarm members --json
    """
    run = _run_named(what, overrides, peer)
    if run.recipe is not None and _is_owner(run.recipe, run_key):
        _show_closed(run.recipe, run.contacts, run_key, as_json)
        return
    with _waiting("asking who has given what; peers that are away delay the answer"):
        told = _told(run)
    if as_json:
        typer.echo(json.dumps(told.as_json(), indent=2))
    else:
        told.print()


def _is_owner(recipe: Recipe, run_key: Path | None) -> bool:
    """Whether the run's key, which only its owner has, is there to look at the members of a closed run."""
    return recipe.access == "invite" and (run_key is not None or key_file(recipe).exists())


def _told(run: _Run) -> Told:
    """Asks as somebody who only looks; if a closed run shows itself only to members, asks this user's own peer. Raises
    SwarmError."""
    try:
        visitor = visitor_of(run.recipe or run.link)
        return contributions.told_by(visit(run.contacts, lambda node: ask_for_tables(node, run.run_id), visitor))
    except SwarmError:
        if (told := _told_here(run.run_id)) is None:
            raise
        return told


def _told_here(run_id: str) -> Told | None:
    """Returns None if no peer of this user takes part in the run and can be asked. A peer that was never asked before
    has to ask the monitors first."""
    own = next((peer for peer in LocalPeers().peers() if peer.run_id == run_id and peer.api), None)
    if own is None:
        return None
    deadline = time.monotonic() + 12.0
    while not (found := client.get(own, "contributions")) and time.monotonic() < deadline:
        time.sleep(0.5)
    rests_on = client.get(own, "state")["me"]["rests_on"]
    lines = [rests_on or "no monitor of this run could be asked"]
    return Told(run_id, [Contribution(**each) for each in found], lines, {"rests_on": rests_on})


def _show_closed(recipe: Recipe, contacts: list[str], run_key: Path | None, as_json: bool) -> None:
    key, path = load_key(recipe, run_key)
    visit = Visit(recipe, key, InvitationLedger.beside(path), contacts)
    with _waiting("asking who takes part"):
        found, given = visit.do(visit.look_with_tables)
    told = contributions.told_by(given)
    if as_json:
        listed = {
            "members": [asdict(each) for each in found],
            "invited": [asdict(each) for each in visit.ledger.invited],
            "revoked": visit.ledger.revoked,
        }
        typer.echo(json.dumps(listed | told.as_json(), indent=2))
        return
    out.print(_members_table(found))
    others = _invitations_table(found, visit.ledger)
    if others.row_count:
        out.print(Text("\ninvitations that none of these has shown", style="bold"))
        out.print(others)
    if told.contributions:
        out.print(Text("\nwhat each has given", style="bold"))
        told.print()


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that was named, and peers of it; `recipe`: if its file is at hand."""

    run_id: str
    contacts: list[str]
    recipe: Recipe | None = None
    link: Link | None = None  # if there is no recipe


def _run_named(what: str | None, overrides: list[str], peers: list[str]) -> _Run:
    """Raises UsageError if no peer of the run is known, or several runs are meant."""
    if what is not None and is_link(what):
        link = parse_link(what)
        return _Run(link.run_id, [*peers, *link.addresses], link=link)
    if what is not None and Path(what).is_file():
        recipe = load_recipe(what, overrides)
        return _Run(recipe.run_id, _contacts_of(recipe, peers), recipe)
    home = home_of(what, LINK, JOURNAL_NAME)
    contacts = [*peers, *contacts_of(home)]
    if not contacts:
        raise UsageError(
            f"the peer of {home} does not run, and knew no other one; start it again, or name a peer of its run with "
            "--peer tcp://host:port"
        )
    return _Run(runs_of(home)[0], contacts, link=link_of(home))


def _contacts_of(recipe: Recipe, peers: list[str]) -> list[str]:
    contacts = [*peers, *recipe.network.initial_peers]
    if not peers:
        contacts += [address for home in _links_here(recipe) for address in contacts_of(home)]
    if not contacts:
        raise UsageError(
            f"no peer of the run {recipe.run_id} runs on this computer; start `swarm monitor {recipe.file}` first, "
            "or name a peer elsewhere with --peer tcp://host:port"
        )
    return list(dict.fromkeys(contacts))


def _links_here(recipe: Recipe) -> dict[Path, Link]:
    try:
        digest = digest_of(recipe)
        return {home: each for home, each in links_of(recipe.file).items() if each.fingerprint == digest}
    except UsageError:
        return {}


def _host_of(recipe: Recipe, link: str | None) -> Link:
    """Returns a link, without an invitation, of the peer that the newcomer dials first."""
    if link is not None:
        given = parse_link(link)
        if given.fingerprint != digest_of(recipe):
            raise UsageError("that link is one of another run: its fingerprint is not this recipe's")
        return replace(given, ticket=None, others=())
    found = _links_here(recipe)
    if not found:
        raise UsageError(
            f"no peer of the run {recipe.run_id} on this computer has given out a link; start `swarm monitor "
            f"{recipe.file}` first, or name a link of a peer elsewhere with --link"
        )
    return replace(list(found.values())[-1], others=())  # an invitation has to be shown to this one peer


def _members_table(found: list[RunMember]) -> Table:
    table = plain_table()
    for column in ("peer", "name", "role"):
        table.add_column(column, no_wrap=True)
    table.add_column("epoch", justify="right")
    for column in ("invitation", "until"):
        table.add_column(column, no_wrap=True)
    table.add_column("", overflow="fold")
    for each in sorted(found, key=lambda member: (not member.role, member.role != "monitor", member.name)):
        table.add_row(
            each.peer[:10],
            printable(each.name, 24),
            each.role,
            str(each.epoch) if each.role else "",
            each.invitation or "not reached",
            _until(each.until),
            Text(printable(each.ended, 60), style="red"),
        )
    return table


def _invitations_table(found: list[RunMember], ledger: InvitationLedger) -> Table:
    shown = {each.invitation for each in found}
    table = plain_table()
    for column in ("invitation", "for", "until", "note", ""):
        table.add_column(column, no_wrap=True)
    for each in ledger.invited:
        if each.id not in shown:
            revoked = each.id in ledger.revoked
            state = "revoked" if revoked else "ended" if each.until <= time.time() else ""
            whom = each.peer[:10] or "the bearer"
            table.add_row(each.id, whom, _until(each.until), printable(each.note, 40), Text(state, style="red"))
    return table


def _until(seconds: int) -> str:
    return format_moment(seconds) if seconds else ""


def _waiting(what: str) -> AbstractContextManager[object]:
    return err.status(what) if err.is_terminal else nullcontext()
