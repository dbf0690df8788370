"""Which of this user's running peers a verb means, and what they are called. Light to import, so verbs answer at
once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmcli.errors import ControlError
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.words import printable

OfRun = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only peers of this run.")]
Called = Annotated[
    str | None,
    typer.Option(
        "--peer",
        metavar="NAME",
        help="Only the peer of this name, as status shows it, or of this directory (trainer-2).",
    ),
]
At = Annotated[Path | None, typer.Option("--home", metavar="DIRECTORY", help="Only the peer with this directory.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but warnings and errors.")]
LastEpoch = Annotated[
    bool,
    typer.Option(
        "--last-epoch",
        help="Take the weights of the last epoch, where the run averages weights over epochs (ema_decay).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

NOBODY = "no peer of yours runs on this computer"
HOW_TO_JOIN = 'join a run with: swarm join "swarm://…"'


@dataclass(frozen=True, kw_only=True)
class WhichPeers:
    """Options of verbs about this user's running peers."""

    run: OfRun = None
    peer: Called = None
    home: At = None
    quiet: Quiet = False

    @property
    def are_named(self) -> bool:
        return (self.run, self.peer, self.home) != (None, None, None)

    def peers_of(self, registry: LocalPeers) -> list[LocalPeer]:
        """Returns the running peers that are meant. Raises ControlError that names the running ones, if it is none of
        them."""
        running = registry.peers()
        if not running:
            raise ControlError(f"{NOBODY}; {HOW_TO_JOIN}")
        found = [
            peer
            for peer in running
            if self.run in (None, peer.run_id)
            and self.peer in (None, peer.name, Path(peer.home).name)
            and (self.home is None or Path(peer.home) == self.home.absolute())
        ]
        if not found:
            raise ControlError(f"no peer of yours fits that; these run: {', '.join(map(described, running))}")
        return found


@dataclass(frozen=True, kw_only=True)
class AskedPeers(WhichPeers):
    as_json: Json = False


def spread(verb: Callable[[Any], None]) -> Callable[..., None]:
    """Returns the verb in the form that typer reads: each field of its `options` is an option of its own."""
    kind = signature(verb, eval_str=True).parameters["options"].annotation
    fields = signature(kind, eval_str=True)

    @wraps(verb)
    def spread_out(**given: Any) -> None:
        verb(kind(**given))

    spread_out.__signature__ = fields  # type: ignore[attr-defined]
    spread_out.__annotations__ = {name: field.annotation for name, field in fields.parameters.items()}
    return spread_out


def described(peer: LocalPeer) -> str:
    """For example: Ada (trainer of stdlib-lm)."""
    return printable(f"{peer.label} ({peer.role} of {peer.run_id})")
