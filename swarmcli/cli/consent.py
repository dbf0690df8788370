"""Tells a volunteer in plain lines what joining by a link will do on this computer, and asks the one question.

Each line says what the code does, with the numbers that can be known before anything is read or downloaded. Texts of
the recipe come from a stranger and are shown as `printable` leaves them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmcli.cli.console import err
from swarmcli.errors import RecipeError
from swarmcli.journal import printable
from swarmcli.machine.places import VARIABLE
from swarmcli.optim.config import Role
from swarmcli.optim.epoch.seat import before_joining
from swarmcli.reach.relaying import RelayBudgets
from swarmcli.recipe import AnyDataset, FilesDataset, HuggingFaceDataset, Limits, Recipe
from swarmcli.recipe.dataset import LOCAL_BUILDERS
from swarmcli.recipe.limits import in_words
from swarmcli.recipe.offered import evaluated_datasets, lacking, of_this_computer, web_host
from swarmcli.recipe.pretrained import saved_tokenizer
from swarmcli.recipe.task_names import task_in_words
from swarmcli.recipe.ticket import Ticket
from swarmcli.training.demand import Demand
from swarmcli.words import format_duration, format_moment, format_size, plural

QUESTIONS = {"trainer": "Train along?", "auxiliary": "Help this run?", "monitor": "Follow this run?"}
JOURNAL_BYTES = 8 << 20  # "some megabytes": a peer's journal, logs and small files of its first days
NO_LIMITS = "none; `swarm limits set upload=2MB/s hours=22-8` sets some"
WHAT = {
    "trainer": "your computer is a trainer: it computes what the model learns",
    "auxiliary": "your computer is an auxiliary: it adds up what trainers compute",
    "monitor": "your computer is a monitor: it keeps the model and hands it out",
}


def sheet(
    recipe: Recipe, role: Role, demand: Demand, memory: str, files: Path, limits: Limits
) -> list[tuple[str, str]]:
    """Returns the lines, each a word and what to say about it. What matters most comes first; with the question, a
    usual recipe's lines fit a terminal of 24 lines. `memory`: as `check_memory` tells it. Raises RecipeError."""
    seat = before_joining(demand.round, limits.link, recipe.target_batch_size, demand.told_pace)
    return [
        ("role", WHAT[role]),
        ("model", _model(recipe, demand)),
        ("memory", f"about {memory}"),
        ("disk", _disk(recipe, role, demand, files)),
        ("traffic", _traffic(recipe, role, demand)),
        *([("line", seat)] if role == "trainer" else []),
        ("processor", _processor(recipe, role)),
        ("leaving", "Ctrl-C at any time; the same command takes you back in"),
        ("limits", "; ".join(in_words(limits)) or NO_LIMITS),
        ("data", _data(recipe, role) or "none"),
        ("download", _download(recipe, role, demand)),
        ("files", str(files)),
        ("others see", "this computer's address and device, what it gives, your --name"),
        ("router", _router(recipe)),
    ]


def invitation_in_words(ticket: Ticket) -> str:
    """Says what an invitation to a closed run allows."""
    whom = "one peer, the first that uses it" if ticket.secret else "this computer's peer alone"
    until = format_moment(ticket.invitation.until)
    return f"a closed run, for invited peers only; this invitation is for {whom}, until {until}"


def _model(recipe: Recipe, demand: Demand) -> str:
    base = recipe.base_model
    saved = f"the model {base} of the Hub" if recipe.revision else "a saved model"
    kind = printable(saved, 200) if isinstance(base, str) else f"a {printable(base['model_type'], 40)} model"
    length = f"; the run has {recipe.max_epochs:,} epochs" if recipe.max_epochs else ""
    part = f", of which {demand.trained:,} are trained" if demand.trained < demand.parameters else ""
    by = f" (quantized by {recipe.quantized_by})" if recipe.quantized_by else ""
    return (
        f"{kind}{by} of {demand.parameters:,} parameters{part} that {printable(task_in_words(recipe.task), 80)}; "
        f"an epoch is {plural(recipe.target_batch_size, 'sample')} of all computers together{length}"
    )


def _data(recipe: Recipe, role: Role) -> str:
    read = recipe.datasets if role == "trainer" else () if role == "auxiliary" else evaluated_datasets(recipe)
    if not read:
        return ""
    said = ("" if role == "trainer" else "for evaluations alone: ") + "; ".join(_datasets(recipe, read))
    gone = ", ".join(printable(str(place), 200) for place in lacking(recipe, read)[:4])
    return f"{said}; nothing lies at {gone}" if gone else said


def _datasets(recipe: Recipe, datasets: Iterable[AnyDataset]) -> Iterator[str]:
    for dataset in datasets:
        if isinstance(dataset, FilesDataset):
            where = recipe.locate(dataset.path, data=True)
            yield f"text files of this computer: {printable(dataset.glob, 60)} below {printable(str(where), 200)}"
        elif not isinstance(dataset, HuggingFaceDataset):
            yield "the source files of Python's standard library, on this computer"
        elif dataset.data_files and dataset.path in LOCAL_BUILDERS:
            named = [
                printable(file, 80) if web_host(file) else printable(str(recipe.locate(file, data=True)), 200)
                for file in dataset.data_files
            ]
            yield f"{', '.join(named[:4])}{f' and {len(named) - 4} more' if len(named) > 4 else ''}"
        else:
            part = ", ".join(filter(None, [dataset.name, dataset.split, *dataset.data_files[:4]]))
            yield f"the dataset {dataset.path} ({printable(part, 80)}) from huggingface.co"


def _download(recipe: Recipe, role: Role, demand: Demand) -> str:
    said = [f"the model as it is now, from peers, once: {format_size(demand.state)}"] if demand.state else []
    if demand.frozen:
        whence = ", from huggingface.co or other peers" if recipe.revision else ""
        size = format_size(demand.frozen)
        said.append(f"the weights that are not trained, once{whence}, if this computer lacks them: {size}")
    hub = [
        dataset
        for dataset in recipe.datasets
        if isinstance(dataset, HuggingFaceDataset) and len(of_this_computer(dataset)) < max(1, len(dataset.data_files))
    ]
    if role == "trainer" and hub:
        whole = sorted({dataset.path for dataset in hub if not dataset.streaming})
        if whole:
            said.append(f"all of {printable(', '.join(whole), 200)} before training (its page says how large it is)")
        if any(dataset.streaming for dataset in hub):
            nbytes = recipe.sequence_len * (1 if saved_tokenizer(recipe) is None else 4)
            size = f"about {format_size(nbytes)}" if nbytes else "an image"
            said.append(f"data while it trains, {size} for each sample")
    return "; ".join([*said, "no programs"]) if said else "nothing"


def _disk(recipe: Recipe, role: Role, demand: Demand, files: Path) -> str:
    """Raises RecipeError if the peer's own files have no room; what it downloads may be on this computer already."""
    place = next(each for each in (files, *files.absolute().parents) if each.exists())
    free = shutil.disk_usage(place).free
    checkpoint = 0 if role == "auxiliary" else demand.state + (0 if recipe.adapter else demand.frozen)
    # One more than is kept: the oldest is removed after the newest was verified.
    least = JOURNAL_BYTES + (recipe.checkpoint.keep + 1) * checkpoint
    if free < least:
        raise RecipeError(
            f"{files} has {format_size(free)} free, and what this peer keeps there takes {format_size(least)}; make "
            f"room, or set {VARIABLE} to a directory that has it"
        )
    if role == "auxiliary":
        return f"some MB of records; {format_size(free)} are free"
    enough = free > least + demand.frozen
    return (
        f"{plural(recipe.checkpoint.keep, 'saved model')} of {format_size(checkpoint)}, some MB of records; "
        f"{'' if enough else 'only '}{format_size(free)} are free{'' if enough else ', which is too little'}"
    )


def _processor(recipe: Recipe, role: Role) -> str:
    if role != "trainer":
        return "little, some seconds for each average"
    device = {"auto": "a graphics card if there is one"}.get(recipe.local.device, recipe.local.device)
    threads = recipe.local.threads
    return f"{device}; {plural(threads, 'thread') if threads else 'all cores'}"


def _traffic(recipe: Recipe, role: Role, demand: Demand) -> str:
    # A peer that nobody can dial relays nothing, whatever its options say.
    relays = (role != "trainer" if recipe.local.relay is None else recipe.local.relay) and not recipe.local.client_mode
    rate = format_size(recipe.local.relay_rate or RelayBudgets().rate or 0)
    others = f"; and it passes on others' connections, at most {rate} a second (--no-relay: none)" if relays else ""
    amounts, told = (demand.sent, demand.received), demand.told_pace
    up, down = (f"{format_size(demand.an_hour(n))} an hour" if told else f"{format_size(n)} an epoch" for n in amounts)
    pace = f"an epoch in {format_duration(demand.pace)}, as the contact says"
    if not told:
        minute, second = (_both_ways([format_size(n * count) for n in amounts]) for count in (60, 3600))
        pace = (
            f"nobody knows yet how long an epoch takes: {minute} an hour if it takes a minute, {second} if it takes a "
            "second"
        )
    if demand.peers_are_told:
        said = f"about {up} up and {down} down"
    else:
        said = f"at most {up} each way" + (" for each trainer that it helps" if role == "auxiliary" else "")
    return f"{said}; {pace}{others}"


def _both_ways(sizes: Sequence[str]) -> str:
    up, down = sizes
    return up if up == down else f"{up} up and {down} down"


def _router(recipe: Recipe) -> str:
    if not recipe.local.port_mapping or recipe.local.client_mode:
        return "swarm asks it for nothing"
    return "swarm may ask it to let others in; --no-port-mapping forbids it"


def show(recipe: Recipe, contact: str, lines: Sequence[tuple[str, str]], console: Console = err) -> None:
    """Prints the sheet, wrapped to the width of the terminal."""
    console.print(Text.assemble("You have a link to the run ", (recipe.run_id, "bold"), f", from peer {contact}."))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for word, text in lines:
        table.add_row(Text(f"  {word}"), Text(text))
    console.print(table)


def ask(role: Role) -> bool:
    """Asks one question on the terminal."""
    forget_what_was_typed()
    err.print(f"{QUESTIONS[role]} [y/N] ", end="")
    try:
        answer = input()
    except EOFError:
        err.print()
        return False
    return answer.strip().lower() in ("y", "yes")


def forget_what_was_typed() -> None:
    """Drops what was typed at this terminal before the question appeared: it is no answer to it."""
    if sys.platform == "win32":
        import msvcrt

        while msvcrt.kbhit():
            msvcrt.getwch()
    else:
        import termios

        with suppress(OSError, termios.error):  # something in place of a terminal keeps no input back
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
