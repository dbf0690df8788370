"""`swarm init`, and what the owner of a closed run types: `swarm invite`, `revoke` and `members`."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from swarmcli.cli.console import err, out, plural
from swarmcli.cli.peers import Overrides, Peers
from swarmcli.errors import RecipeError, UsageError
from swarmcli.journal import printable

if TYPE_CHECKING:
    from swarmcli.recipe import Link, Recipe
    from swarmcli.roles.owner import Ledger, Member, Visit

RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe file of the run.", show_default=False)]
KeyFile = Annotated[
    Path | None,
    typer.Option("--run-key", help="The run key. Default: <run id>.run-key beside the recipe.", show_default=False),
]
DAYS = 30.0
MAX_DAYS = 3650.0

TEMPLATE = """\
# A run of swarm. docs/recipes.md tells every key; `swarm validate {file}` checks this file without any network.
run_id: {run_id}
{access}
# What is trained: a config of transformers, or the directory of a saved model. This one learns to write Python from the
# sources of Python's own standard library, so that it can be tried at once: put your own model and data here.
base_model:
  model_type: gpt2
  n_layer: 2
  n_head: 4
  n_embd: 128
  resid_pdrop: 0.0
  embd_pdrop: 0.0
  attn_pdrop: 0.0
tokenizer: bytes          # or a directory with a saved tokenizer
datasets:
  - type: stdlib          # or files (path, glob), or huggingface (path, split, text_column)
sequence_len: 64          # tokens per sample

# All peers together compute so many samples, then average their gradients and step: that is an epoch.
target_batch_size: 512
micro_batch_size: 16      # per forward pass; each volunteer may choose another with local.micro_batch_size
max_epochs: 60            # null: until everybody has stopped
seed: 1
output_dir: runs          # journals, checkpoints and identities of the peers of this computer

optimizer:
  name: adamw
  learning_rate: 6e-3
  betas: [0.9, 0.95]
  max_grad_norm: 1.0
lr_scheduler:
  name: cosine
  warmup_epochs: 10
  min_lr_ratio: 0.1
checkpoint:
  every_epochs: 20
"""
OPEN = """
# Whoever has a link takes part. `swarm init --invite` begins a run that asks for invitations.
access: open
"""
INVITE = """
# Only whom you invite takes part: `swarm invite {file}`. The other half of this key is in {key}:
# keep that file, give it to nobody, and make a copy of it; without it nobody can be invited or revoked any more.
access: invite
run_key: {public}
"""


def init(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe file to write.")] = "recipe.yaml",
    run_id: Annotated[
        str | None, typer.Option(help="The name of the run. Default: the file's name.", show_default=False)
    ] = None,
    invite: Annotated[
        bool, typer.Option("--invite", help="A closed run: only whom you invite takes part. Makes the run key too.")
    ] = False,
) -> None:
    """Begin a run of your own: write a recipe with comments, and for a closed run its key."""
    from swarmcli.recipe import load_recipe, parse_recipe
    from swarmcli.recipe.run_key import RunKey
    from swarmcli.recipe.schema import RUN_ID

    file = Path(recipe)
    name = run_id or file.stem
    if not RUN_ID.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a run; name one with --run-id: letters, digits, dots, dashes")
    if file.exists():
        raise UsageError(f"{file} is there already; name another file, or remove it")
    parse_recipe(TEMPLATE.format(file=file, run_id=name, access=OPEN))  # before anything is written
    key_path = file.with_name(f"{name}.run-key")
    access = OPEN
    if invite:
        key = RunKey.create(key_path)
        access = INVITE.format(file=file, key=key_path.name, public=key.public)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(TEMPLATE.format(file=file, run_id=name, access=access))
    except OSError as error:
        raise RecipeError(f"{file} cannot be written: {error.strerror}") from error
    load_recipe(file)
    err.print(
        f"wrote {file}" + (f" and the run key {key_path}, which is yours alone" if invite else ""), soft_wrap=True
    )
    words = "change the model and the data first; then begin the run on a computer that others can dial:"
    err.print(words, soft_wrap=True)
    out.print(f"swarm monitor {shlex.quote(str(file))}", soft_wrap=True)
    if invite:
        err.print(f"and while that runs, invite others: swarm invite {shlex.quote(str(file))}", soft_wrap=True)


def invite(
    recipe: RecipeFile,
    overrides: Overrides,
    peer: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PEER",
            help="For this peer id alone. Default: for whoever takes it up first.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[float, typer.Option(help="For how long it holds.")] = DAYS,
    note: Annotated[str, typer.Option(help="For your own list, and to revoke it by.", show_default=False)] = "",
    link: Annotated[
        str | None,
        typer.Option(help="A link of the run. Default: that of its peer on this computer.", show_default=False),
    ] = None,
    run_key: KeyFile = None,
    copyable: Annotated[
        bool, typer.Option("--copyable", help="Print the link alone, for a clipboard or a pipe.")
    ] = False,
) -> None:
    """Make a link by which somebody joins a closed run."""
    from swarmcli.cli.consent import moment
    from swarmcli.network.identity import PeerID
    from swarmcli.recipe import digest_of, load_recipe
    from swarmcli.recipe.ticket import Ticket
    from swarmcli.roles.owner import Ledger, load_key

    loaded = load_recipe(recipe, overrides)
    key, path = load_key(loaded, run_key)
    if not 0 < days <= MAX_DAYS:
        raise UsageError(f"--days is more than 0 and at most {MAX_DAYS:g}, got {days:g}")
    whom = PeerID.parse(peer) if peer is not None else None
    host = _host_of(loaded, link)
    digest, until = digest_of(loaded), int(time.time() + days * 86_400)
    ledger = Ledger.beside(path)
    if whom is None:
        ticket = Ticket.for_bearer(key.public, *key.invite_bearer(digest, host.peer_id, until))
    else:
        ticket = Ticket(key.public, key.invite(digest, whom, until).invitation)
    ledger.note(ticket.invitation, peer=whom, note=note)
    made = replace(host, ticket=ticket)
    out.print(str(made) if copyable else f'swarm join "{made}"', soft_wrap=True)
    terms = (
        f"for the peer {whom.short}… alone"
        if whom
        else f"for whoever takes it up first, so give it to one person, in private; {host.peer_id.short}… must run then"
    )
    err.print(f"invitation {ticket.invitation.id.hex()}, until {moment(until)}, {terms}", soft_wrap=True)


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
    """Take back invitations of a closed run: its members close all connections with those peers."""
    from swarmcli.roles.owner import describe_subject

    visit = _visit(recipe, overrides, peer, run_key)
    with _waiting("telling the members"):
        subjects, told = visit.do(partial(visit.revoke, who))
    for subject in subjects:
        out.print(f"revoked {describe_subject(subject)}", soft_wrap=True)
    err.print(
        f"told {plural(told, 'member')}, who tell the others: all have hung up within a minute, and the rounds go on"
        if told
        else "no member could be told; it is noted, and told by the next `swarm members`",
        soft_wrap=True,
    )


def members(
    recipe: RecipeFile,
    overrides: Overrides,
    peer: Peers,
    run_key: KeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Show who takes part in a closed run, by which invitation, and which invitations nobody has taken up."""
    visit = _visit(recipe, overrides, peer, run_key)
    with _waiting("looking who takes part"):
        found = visit.do(visit.look)
    if as_json:
        listed = {
            "members": [asdict(each) for each in found],
            "invited": [asdict(each) for each in visit.ledger.invited],
            "revoked": visit.ledger.revoked,
        }
        typer.echo(json.dumps(listed, indent=2))
        return
    out.print(_members_table(found))
    others = _invitations_table(found, visit.ledger)
    if others.row_count:
        out.print(Text("\ninvitations that none of these has shown", style="bold"))
        out.print(others)


def _visit(recipe: str, overrides: list[str], peers: list[str], run_key: Path | None) -> Visit:
    from swarmcli.recipe import load_recipe
    from swarmcli.roles.owner import Ledger, Visit, load_key

    loaded = load_recipe(recipe, overrides)
    key, path = load_key(loaded, run_key)
    contacts = [*peers, *loaded.network.initial_peers]
    if not peers:
        contacts += [address for link in _links_here(loaded) for address in link.addresses]
    if not contacts:
        raise UsageError(
            f"no peer of the run {loaded.run_id} is known on this computer; start `swarm monitor {loaded.file}` first, "
            "or name a peer elsewhere with --peer tcp://host:port"
        )
    return Visit(loaded, key, Ledger.beside(path), list(dict.fromkeys(contacts)))


def _links_here(recipe: Recipe) -> list[Link]:
    from swarmcli.cli.link import links_of
    from swarmcli.recipe import digest_of

    try:
        return [each for each in links_of(recipe.file).values() if each.fingerprint == digest_of(recipe)]
    except UsageError:
        return []


def _host_of(recipe: Recipe, link: str | None) -> Link:
    """A link without an invitation, of whom the newcomer dials first."""
    from swarmcli.recipe import digest_of, parse_link

    if link is not None:
        given = parse_link(link)
        if given.fingerprint != digest_of(recipe):
            raise UsageError("that link is one of another run: its fingerprint is not this recipe's")
        return replace(given, ticket=None)
    found = _links_here(recipe)
    if not found:
        raise UsageError(
            f"no peer of the run {recipe.run_id} on this computer has given out a link; start `swarm monitor "
            f"{recipe.file}` first, or name a link of a peer elsewhere with --link"
        )
    return found[-1]


def _members_table(found: list[Member]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
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


def _invitations_table(found: list[Member], ledger: Ledger) -> Table:
    shown = {each.invitation for each in found}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
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
    from swarmcli.cli.consent import moment

    return moment(seconds) if seconds else ""


def _waiting(what: str) -> AbstractContextManager[object]:
    return err.status(what) if err.is_terminal else nullcontext()
