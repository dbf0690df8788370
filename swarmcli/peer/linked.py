"""Runs that were joined by a link: where their files lie on this computer, and to what a person agreed.

    <data directory>/<run id>-<beginning of the fingerprint>/
        recipe.yaml     what the contact handed out, checked, with this computer's own settings beside it
        agreed.json     role → hash of the recipe that somebody agreed to in that role
        invitation      to a closed run, from the link; readable by this user alone
        data/           for what a recipe reads and no link brings
        models/         config and tokenizer of a saved model, as a peer of the run handed them out
        <run id>/       the peers: trainer-1, monitor-1, …

The recipe is written when somebody has agreed, never before. From then on it is a recipe like any other. A model's
files come before somebody decides, since its size is computed from them, and are removed if the answer is no.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swarmcli.errors import MembershipError, RecipeError, SwarmError
from swarmcli.files.durable import write_file
from swarmcli.machine.places import VARIABLE, data_directory
from swarmcli.owner.invitations import keep_ticket, of_recipe, visiting
from swarmcli.recipe import Link, Recipe, digest_of, load_recipe
from swarmcli.recipe.offered import DATA
from swarmcli.recipe.pretrained import MODELS
from swarmcli.recipe.ticket import Ticket
from swarmcli.run.asking import Visitor

if TYPE_CHECKING:
    from swarmcli.optim.config import Role  # it imports torch: a link that cannot be read is refused before that

RECIPE = "recipe.yaml"
AGREED = "agreed.json"


class LinkedRun:
    """The directory of one run. Nothing is written before `keep`."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.path = data_directory() / f"{link.run_id}-{link.fingerprint[:8]}"
        self.brought: dict[Path, int] = {}  # a model's files that came for this link → their sizes

    @property
    def recipe(self) -> Path:
        return self.path / RECIPE

    def kept(self) -> str | None:
        """Returns the recipe that was kept earlier, if it still is the one of the link. Nobody need be asked for it
        then: the fingerprint proves that it has not changed."""
        try:
            if digest_of(load_recipe(self.recipe)) == self.link.fingerprint:
                return self.recipe.read_text(encoding="utf-8")
        except (RecipeError, OSError):
            pass
        return None

    def visitor(self) -> Visitor | None:
        """Returns who looks at the link's run if it is closed: a peer of it on this computer, or the holder of the
        link. None: neither is known here. Raises MembershipError, IdentityError."""
        if self.recipe.exists():  # then this computer has joined, and has used a bearer's invitation
            with suppress(MembershipError, RecipeError):
                if (recipe := load_recipe(self.recipe)).access == "invite":
                    return of_recipe(recipe)
        if self.link.ticket is None:
            return None
        return visiting(self.link.ticket, self.link.fingerprint, self.path / self.link.run_id)

    def text_of(self, recipe: Recipe) -> str:
        """Returns the text that is kept of a recipe that was handed out: with the paths of this computer, and the
        contact."""
        values = json.loads(recipe.source[0])
        own = {
            "output_dir": ".",
            "network": {"initial_peers": list(self.link.addresses)},
            "local": {"data_dir": DATA},
        }
        text = json.dumps(values | own, ensure_ascii=False, indent=1) + "\n"
        # YAML refuses these characters within a text, or takes them for ends of lines, and this is read again as YAML.
        return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda each: f"\\u{ord(each[0]):04x}", text)

    def bring(self, files: Mapping[Path, bytes]) -> None:
        """Puts the files of a model into their places. Raises SwarmError."""
        try:
            for path, data in files.items():
                if not path.exists():
                    self.brought[path] = len(data)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_file(path, data)
        except OSError as error:
            raise self._unwritable(error) from error

    def forget(self) -> None:
        """Removes what `bring` wrote, unless this process or another one keeps the run."""
        for path in () if self.recipe.exists() else self.brought:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # the directory holds something else
                for above in (path.parent, path.parent.parent, self.path):
                    above.rmdir()
        self.brought = {}

    def has_agreed(self, role: Role, text: str) -> bool:
        return self._agreements().get(role) == _hash(text)

    def keep(self, role: Role, text: str) -> None:
        """Writes down the recipe, and that somebody has agreed to it in this role. Raises SwarmError."""
        agreements = self._agreements() | {role: _hash(text)}
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in (DATA, MODELS):
                (self.path / name).mkdir(exist_ok=True)
            write_file(self.recipe, text.encode())
            write_file(self.path / AGREED, f"{json.dumps(agreements, indent=1)}\n".encode())
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> SwarmError:
        return SwarmError(f"{self.path} cannot be written ({error.strerror}); set {VARIABLE} to another directory")

    def keep_invitation(self, ticket: Ticket) -> None:
        """Writes down the link's invitation to a closed run, for the peers that begin here. Raises SwarmError."""
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


def visitor_of(run: Link | Recipe | None) -> Visitor | None:
    """Returns who looks at a run if it is closed; None: it is open, or nobody who may look is known here. Raises
    MembershipError, IdentityError."""
    if isinstance(run, Recipe):
        return of_recipe(run) if run.access == "invite" else None
    return LinkedRun(run).visitor() if run is not None else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
