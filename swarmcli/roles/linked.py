"""Runs that were joined by a link: where their files lie on this computer, and to what a person agreed.

    <data directory>/<run id>-<beginning of the fingerprint>/
        recipe.yaml     what the contact handed out, checked, with what is this computer's own beside it
        agreed.json     role → hash of the recipe that somebody agreed to in that role
        invitation      to a closed run, from the link; readable by this user alone
        data/, models/  for what a recipe reads and no link brings
        <run id>/       the peers: trainer-1, monitor-1, …

The recipe is written when somebody has agreed, never before. From then on it is a recipe like any other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import platformdirs

from swarmcli.errors import MembershipError, RecipeError, SwarmError
from swarmcli.optim.config import Role
from swarmcli.recipe import Link, Recipe, digest_of, load_recipe
from swarmcli.recipe.offered import DATA, MODELS
from swarmcli.recipe.ticket import Ticket
from swarmcli.roles.invitations import Visitor, keep_ticket, of_recipe, visiting

VARIABLE = "SWARM_DATA_DIR"
RECIPE = "recipe.yaml"
AGREED = "agreed.json"


def data_directory() -> Path:
    """Where this user's runs lie: $SWARM_DATA_DIR, or what the platform has for the data of programs."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().resolve()
    return platformdirs.user_data_path("swarm", appauthor=False)


class LinkedRun:
    """The directory of one run. Nothing is written before `keep`."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.path = data_directory() / f"{link.run_id}-{link.fingerprint[:8]}"

    @property
    def recipe(self) -> Path:
        return self.path / RECIPE

    def kept(self) -> str | None:
        """The recipe of an earlier time, if it still is the one that the link speaks of. Nobody has to be asked for it
        then: the fingerprint says that it has not changed."""
        try:
            if digest_of(load_recipe(self.recipe)) == self.link.fingerprint:
                return self.recipe.read_text(encoding="utf-8")
        except (RecipeError, OSError):
            pass
        return None

    def visitor(self) -> Visitor | None:
        """Who looks at the link's run if it is closed: a peer of it on this computer, or whoever has the link. None:
        the link carries no invitation. Raises MembershipError, IdentityError."""
        if self.link.ticket is None:
            return None
        if self.recipe.exists():  # then this computer has joined, and a bearer's invitation is taken up
            with suppress(MembershipError, RecipeError):
                return of_recipe(load_recipe(self.recipe))
        return visiting(self.link.ticket, self.link.fingerprint, self.path / self.link.run_id)

    def text_of(self, recipe: Recipe) -> str:
        """What is kept of a recipe that has been handed out: with the paths of this computer, and the contact."""
        values = json.loads(recipe.source[0])
        own = {
            "output_dir": ".",
            "network": {"initial_peers": list(self.link.addresses)},
            "local": {"data_dir": DATA},
        }
        return json.dumps(values | own, ensure_ascii=False, indent=1) + "\n"

    def has_agreed(self, role: Role, text: str) -> bool:
        return self._agreements().get(role) == _hash(text)

    def keep(self, role: Role, text: str) -> None:
        """Writes down the recipe, and that somebody has agreed to it in this role. Raises SwarmError."""
        agreements = self._agreements() | {role: _hash(text)}
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in (DATA, MODELS):
                (self.path / name).mkdir(exist_ok=True)
            _write(self.recipe, text)
            _write(self.path / AGREED, json.dumps(agreements, indent=1) + "\n")
        except OSError as error:
            raise SwarmError(
                f"{self.path} cannot be written ({error.strerror}); set {VARIABLE} to another directory"
            ) from error

    def keep_invitation(self, ticket: Ticket) -> None:
        """Writes down what the link brings for a closed run, for the peers that begin here. Raises SwarmError."""
        try:
            keep_ticket(self.path, ticket)
        except OSError as error:
            raise SwarmError(f"{self.path} cannot be written ({error.strerror}); make room there") from error

    def _agreements(self) -> dict[str, str]:
        try:
            found = json.loads((self.path / AGREED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def known_runs() -> Sequence[Path]:
    """The directories of all runs that were joined by a link."""
    return sorted(file.parent for file in data_directory().glob(f"*/{RECIPE}"))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(file: Path, text: str) -> None:
    """The whole file or none of it."""
    temporary = file.with_suffix(f".{os.getpid()}.writing")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
