"""`swarm sign`: the owner of a run says that a checkpoint is the run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from swarmcli.cli.console import err, out
from swarmcli.cli.peers import Overrides
from swarmcli.errors import CheckpointError, UsageError


def sign(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe file of the run.", show_default=False)],
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="The directory of the checkpoint.", show_default=False)
    ],
    overrides: Overrides,
    run_key: Annotated[
        Path | None,
        typer.Option("--run-key", help="The run key. Default: <run id>.run-key beside the recipe.", show_default=False),
    ] = None,
) -> None:
    """Sign a checkpoint with the run key: peers follow whoever comes with it, if it is further than they are."""
    from swarmcli.network.identity import PeerID
    from swarmcli.recipe import digest_of, load_recipe
    from swarmcli.recipe.run_key import RunKey, is_owners_position
    from swarmcli.roles.invitations import key_file
    from swarmcli.training.checkpoint import OWNER, position_of

    loaded = load_recipe(recipe, overrides)
    if loaded.run_key is None:
        raise UsageError(f"{recipe} names no run_key, so peers could not tell whose signature it is; add one to it")
    key = RunKey.load(run_key or key_file(loaded))
    if key.public.text != loaded.run_key:
        raise UsageError(f"that is the key of another run: run_key of this one is {loaded.run_key}")
    position = position_of(checkpoint, loaded.run_id)
    signature = key.sign_position(digest_of(loaded), *position)
    if not is_owners_position(PeerID.parse(loaded.run_key), signature, digest_of(loaded), *position):
        raise UsageError("the run key does not sign: its two halves do not belong together")
    try:
        (checkpoint / OWNER).write_text(json.dumps({"signature": signature.hex()}), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{checkpoint / OWNER} cannot be written: {error.strerror}") from error
    out.print(f"signed epoch {position[0]} at {checkpoint}", soft_wrap=True)
    err.print(f"whoever starts with --resume {checkpoint} now leads those who are not as far", soft_wrap=True)
