"""`swarm export`: writes what a journal holds of a run as tables, as the dashboard does too; or what a run with an
adapter has learned, as a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from swarmcli.cli.console import err
from swarmcli.cli.local import LastEpoch
from swarmcli.cli.which import Which, journal_of
from swarmcli.errors import JournalError, SwarmError, UsageError
from swarmcli.journal import JournalReader
from swarmcli.run.tables import EXPORTS, csv_of, json_of, rows_of

What = Literal["epochs", "evaluations", "rounds", "peers", "contributions", "events"]
FORMS = {"csv": csv_of, "json": json_of}


def export(
    which: Which = None,
    what: Annotated[What | None, typer.Option("--what", help="Which list. Default: all of them.")] = None,
    form: Annotated[
        Literal["csv", "json"], typer.Option("--format", help="For spreadsheets, or for programs.")
    ] = "csv",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|DIR",
            help="Where to: a directory for all lists, a file or nothing (stdout) for one.",
        ),
    ] = None,
    merged: Annotated[
        str | None,
        typer.Option(
            "--merge",
            metavar="CHECKPOINT",
            help="Write a model instead: this adapter, merged into its base, to --output.",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The saved model for --merge. Default: as the checkpoint's peer had it."),
    ] = None,
    last_epoch: LastEpoch = False,
) -> None:
    """Write what a peer saw of its run as tables, for spreadsheets and notebooks.

    Examples:

    swarm export --what epochs > epochs.csv

    swarm export my-run --output tables

    swarm export runs/my-run/monitor-1 --what rounds --format json

    swarm export --merge my-run --output whole-model
    """
    if merged is not None:
        _merge(merged, base, output, last_epoch)
        return
    if what is None and output is None:
        raise UsageError(f"say which list with --what ({', '.join(EXPORTS)}), or a directory for all with --output DIR")
    journal = journal_of(which)
    with JournalReader(journal) as reader:
        runs = reader.runs()
        if not runs:
            raise JournalError(f"{reader.path} holds no run yet")
        run_id = which if which in {run.run_id for run in runs} else runs[-1].run_id
        for name in EXPORTS if what is None else (what,):
            _write(
                FORMS[form](EXPORTS[name], rows_of(reader, run_id, name)),
                output,
                f"{name}.{form}",
                one=what is not None,
            )


def _merge(word: str, base: Path | None, output: Path | None, last_epoch: bool) -> None:
    # Imported here: this imports torch, which tables do not need.
    from swarmcli.cli.generate import checkpoint_named
    from swarmcli.training.merging import merge

    if output is None:
        raise UsageError("--merge writes a model; name the directory for it with --output DIR")
    try:
        merge(checkpoint_named(word), output, base, last_epoch=last_epoch)
    except OSError as error:
        raise SwarmError(f"{output} cannot be written ({error.strerror}); name another place by --output") from error
    err.print(f"{output} is written", soft_wrap=True)


def _write(pieces: Iterator[bytes], output: Path | None, name: str, *, one: bool) -> None:
    if output is None:
        stdout = typer.get_binary_stream("stdout")
        stdout.writelines(pieces)
        stdout.flush()
        return
    file = output if one and not output.is_dir() else output / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            stream.writelines(pieces)
    except OSError as error:
        raise SwarmError(f"{file} cannot be written ({error.strerror}); name another place by --output") from error
    err.print(f"{file} is written", soft_wrap=True)
