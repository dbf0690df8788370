"""`swarm validate`: whether this machine could join with a recipe, and what is in the recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from swarmcli.cli.console import err
from swarmcli.cli.linking import recipe_of, show_sheet
from swarmcli.cli.peers import Overrides
from swarmcli.errors import DataError, RecipeError, UsageError
from swarmcli.journal import printable
from swarmcli.peer.linked import LinkedRun
from swarmcli.recipe import Recipe, SiteSettings, fingerprint_of, is_link, load_recipe, parse_link
from swarmcli.recipe.advice import (
    COUNT,
    Volunteers,
    advise_on,
    further_advice,
    keys_to_write,
    on_lines_of_homes,
    time_to_the_end,
)
from swarmcli.recipe.limit_store import LimitStore, read_limits
from swarmcli.recipe.offered import UNKNOWN, RunEstimate, check_data_here, offered
from swarmcli.recipe.task_names import mean_in_words, task_in_words
from swarmcli.words import format_size, harmless

if TYPE_CHECKING:
    from swarmcli.training.look import LookedAt


def validate(
    recipe: Annotated[str, typer.Argument(metavar="LINK|RECIPE", help="A recipe file, or a link to a run.")],
    overrides: Overrides,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check the file only: build no model and read no data, unless --uplink trains."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print values and fingerprint as JSON.")] = False,
    uplink: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="What a volunteer's line sends, for example 10Mbit/s (Mb or Mbit: bits; MB: bytes): swarm trains the "
            "model for a moment, and prints which way to train suits such lines, and what to write in the recipe.",
        ),
    ] = None,
    volunteers: Annotated[
        int, typer.Option(min=2, help="How many computers, as fast as this one, train at a time; for --uplink.")
    ] = COUNT,
) -> None:
    """Check a recipe as `swarm join` would, without meeting peers; or the recipe of a link, without reading data.

    A model of the Hugging Face Hub that is not here yet is downloaded; with --quick its config and tokenizer alone.

    \b
    swarm validate my-run/recipe.yaml
    swarm validate my-run/recipe.yaml --quick --set optimizer.learning_rate=3e-4
    swarm validate my-run/recipe.yaml --uplink 10Mbit/s --volunteers 8
    """
    linked = is_link(recipe)
    rate = None if uplink is None else read_limits({"upload": uplink}, "--uplink").upload
    if rate is not None and linked:
        raise UsageError("--uplink is for the recipe of a run that is yours; name its file")
    with ExitStack() as undo:
        loaded = (
            _of_link(recipe, overrides, undo, told=not (quick or as_json)) if linked else load_recipe(recipe, overrides)
        )
        fingerprint = fingerprint_of(loaded)
    no_link = "" if linked else _why_no_link(loaded)
    found, looks = ({}, []) if quick or linked else _try_out(loaded)
    if as_json:
        values = loaded.model_dump(mode="json")
        told = {"values": values, "fingerprint": fingerprint, "no_link": no_link, **found}
        told |= {} if rate is None else {"advice": _advice(loaded, rate, volunteers)}
        typer.echo(json.dumps(told | ({"samples": list(map(asdict, looks))} if looks else {}), indent=2))
        return
    if not err.quiet:
        link = {"link": no_link.replace("\n", "; ") or "brings the recipe to whoever joins"}
        agree = {"keys that must agree": str(len(fingerprint))}
        for name, text in {**_summary(loaded), **link, **found, **agree}.items():
            typer.echo(f"{name:<21} {printable(text, 2000)}")
        for look in looks:
            _show(look)
    for note in loaded.notes:
        typer.echo(f"note: {note}")
    for line in [] if rate is None else _advice(loaded, rate, volunteers):
        typer.echo(line)
    if err.quiet:
        return
    if linked:
        typer.echo("the link's recipe is in order; this computer has kept nothing of it, and read no data")
    else:
        alone = ", for those who have the file" if no_link else ""
        typer.echo(f"{recipe} is in order" + (" as far as the file goes" if quick else "") + alone)


def _advice(recipe: Recipe, uplink: float, count: int) -> list[str]:
    """Says which way to train lines of `uplink` bytes per second allow: the arithmetic, then what to write. Raises what
    building the model and reading data raise."""
    from swarmcli.training.pace import numbers_and_pace  # imports torch, which takes seconds

    numbers, pace = numbers_and_pace(recipe)
    advice = advise_on(recipe, numbers, Volunteers(uplink, count, pace))
    told = [
        *advice.lines,
        f"{pace:,.1f} samples a second is this computer's pace just now, the median of several micro-batches: while "
        "other programs run, it computes more slowly than it can.",
    ]
    end = time_to_the_end(recipe, advice)
    if not (lines := keys_to_write(recipe, advice)):
        return [*told, "The recipe trains so already.", *end]
    return [*told, "Write in the recipe:", *(f"  {line}" for line in lines), *further_advice(recipe, advice), *end]


def _why_no_link(recipe: Recipe) -> str:
    """Says why a peer that joins with this file would have no link; "": it would have one."""
    try:
        offered(recipe)
    except RecipeError as error:
        return str(error)
    return ""


def _of_link(text: str, overrides: Sequence[str], undo: ExitStack, *, told: bool) -> Recipe:
    """Returns the recipe that a link leads to; prints to stderr, if wanted, what a trainer would have to agree to. The
    files of its model are here until `undo` is closed."""
    run = LinkedRun(parse_link(text))
    undo.callback(run.forget)
    _, recipe, going = recipe_of(run, overrides)
    if told:
        show_sheet(run, "trainer", recipe, going)
        check_data_here(recipe)
    return recipe


def _summary(recipe: Recipe) -> dict[str, str]:
    """Returns the lines that tell what a recipe is about."""
    model = recipe.base_model if isinstance(recipe.base_model, str) else recipe.base_model["model_type"]
    data = ", ".join(getattr(dataset, "path", dataset.source) for dataset in recipe.datasets)
    return {
        "run": recipe.run_id,
        "task": f"{recipe.task} ({task_in_words(recipe.task)}) on {data}"
        + (f", {recipe.sequence_len} tokens per sample" if recipe.sequence_len else ""),
        "loss": f"mean over {mean_in_words(recipe.task)}",
        "model": str(model),
        "epoch": f"{recipe.target_batch_size} samples of all peers; a step here has "
        f"{recipe.micro_batch * recipe.accumulation_steps}"
        + (f", {recipe.micro_batch} at a time" if recipe.accumulation_steps > 1 else ""),
        **({"site": site_in_words(recipe.local.site)} if recipe.local.site.processes > 1 else {}),
        "access": "closed: only peers that its owner invites take part" if recipe.access == "invite" else "open to all",
        "trust": recipe.trust,
        "ends": f"after epoch {recipe.max_epochs}" if recipe.max_epochs else "when nobody trains any more",
        "output": str(recipe.output_dir),
    }


def site_in_words(site: SiteSettings) -> str:
    """Says to people how the processes of a site work together."""
    shared = ", the optimizer's statistics shared among them" if site.zero else ""
    return f"{site.processes} processes as one peer{shared}"


SIGNS = {"learned": ("«", "»"), "read": ("", ""), "cut": ("{", "}")}  # printed around a stretch of a sample


def _show(look: LookedAt, most: int = 600) -> None:
    """Prints a sample of a dataset, with signs that say what its stretches are for. The middle of a stretch of more
    than `most` characters is left out."""
    rows = f"{look.name:<21} {look.rows:,} rows looked at"
    rows += f", {printable(look.counts, 1000)}" if look.counts else ""
    if look.classes:
        table = [f"\n  {printable(name, 60)} → {n} → {count or 'none'}" for name, n, count in look.classes[:most]]
        typer.echo(f"{rows}; name → number → how often:{''.join(table)}")
        return
    if not look.sample:
        typer.echo(rows)
        return
    sample = ""
    for text, use in look.sample:
        if len(text) > most:
            text = f"{text[: most // 2]} […] {text[-most // 2 :]}"
        before, behind = SIGNS[use]
        sample += f"{before}{harmless(text)}{behind}"
    typer.echo(f"{rows}; a sample of them («learned», only read, {{cut off}}):")
    typer.echo("\n".join(f"  {line}" for line in sample.split("\n")))


def _try_out(recipe: Recipe) -> tuple[dict[str, str], list[LookedAt]]:
    """Checks what only the model and the data themselves can tell; raises what joining would raise."""
    from swarmcli.training import Compute, build_task, choose_compute, parameter_groups
    from swarmcli.training.demand import demand_of
    from swarmcli.training.freezing import frozen_in_words
    from swarmcli.training.look import look_at_rows
    from swarmcli.training.memory import check_memory
    from swarmcli.training.task import samples_in
    from swarmcli.training.tasks.base import ModelTask

    compute = choose_compute(recipe)
    task = build_task(recipe)
    limits = LimitStore(recipe).limits
    outline = task.build_model(outline=True)
    memory = check_memory(recipe, outline, "trainer", compute, limits=limits, now=False)
    demand, of_four = (demand_of(recipe, outline, "trainer", each) for each in (UNKNOWN, RunEstimate(trainers=3)))
    model = task.build_model()
    parameter_groups(recipe, model)
    if isinstance(task, ModelTask):
        task.try_model(model, Compute(next(model.parameters()).device))
    frozen, lacking = frozen_in_words(recipe, model), getattr(model, "lacks_weights", False)
    try:
        batch = next(task.batches(recipe.seed))
        held_out = task.evaluation_batches() if recipe.evaluation.every_epochs else []
        looks = list(look_at_rows(task))
    except DataError as error:
        placed = str(error).startswith((f"{recipe.file}:", "--set "))
        raise RecipeError(str(error) if placed else f"{recipe.origin('datasets')}: {error}") from error
    told = {
        "parameters": f"{demand.parameters:,}"
        + (f", of which {demand.trained:,} are trained" if demand.trained < demand.parameters else ""),
        **({"weights": "not on this computer; the run's peers give them"} if lacking else {}),
        **({"frozen weights": frozen} if frozen else {}),
        "first batch": ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items()),
        **({"evaluation": f"on {sum(map(samples_in, held_out)):,} samples"} if held_out else {}),
        "device": str(compute),
        "memory": f"about {memory}",
        "a trainer sends": f"{format_size(demand.message)} an epoch if two train, up to twice that if more do; it "
        "receives at most as much"
        if demand.message == demand.average
        else f"{format_size(demand.message)} of its own an epoch, and averages of up to "
        f"{format_size(of_four.average)} with four trainers, {format_size(demand.average)} with many; "
        "it receives as much",
        "sending takes": on_lines_of_homes(of_four.average),
    }
    return told, looks
