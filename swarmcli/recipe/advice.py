"""Chooses a way to train by the volunteers' lines: seconds of sending beside seconds of computing, with the arithmetic.

In a round of n members each sends its own numbers to those who add them up, and the averages of its part to the others:
2 (n - 1)/n times what it brings. The ways are those of docs/modes.md that lose least for their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmcli.recipe.schema import Recipe
from swarmcli.recipe.settings import GradientCodec
from swarmcli.words import format_duration, format_rate, format_size

WIDTHS: Mapping[GradientCodec, float] = {  # bytes of a number on the wire, with the scales of its block
    "none": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "scaled_float16": 2.0,
    "uniform_8bit": 1.002,
    "quantile_8bit": 1.002,
    "blockwise_8bit": 1.002,
    "blockwise_4bit": 0.563,
}


@dataclass(frozen=True, slots=True)
class TrainingWay:
    """How peers train, and in which form a round's numbers travel."""

    name: str
    codec: GradientCodec
    steps: int = 1  # steps of each peer between two rounds; 1: gradients are averaged for every step


WAYS = (  # the least loss first, by the table of docs/modes.md
    TrainingWay("gradients in float32", "none"),
    TrainingWay("gradients in 8 bits", "blockwise_8bit"),
    TrainingWay("gradients in 4 bits", "blockwise_4bit"),
    TrainingWay("outer steps every 15 in 4 bits", "blockwise_4bit", 15),
    TrainingWay("outer steps every 50 in 4 bits", "blockwise_4bit", 50),
)
SHARE = 0.5  # of the time of computing: sending may take so much, so at most a third of all time is waiting
HOMES = 10, 50, 100  # Mbit/s up of usual lines
COUNT = 4  # volunteers, where nobody says how many
RATE_OF_MUON = 3.0  # times AdamW's learning rate: with Muon, a peer's own steps lose least (docs/modes.md)
LEAST_EPOCHS = 20  # with fewer rounds peers would learn apart


@dataclass(frozen=True, slots=True)
class Volunteers:
    """The computers that are expected in a run at one time."""

    uplink: float  # bytes per second that each sends
    count: int  # two at least
    pace: float  # samples per second that each computes

    def sending(self, nbytes: float) -> float:
        """Returns the seconds that each volunteer sends in a round to which it brings `nbytes`."""
        return 2 * (self.count - 1) / self.count * nbytes / self.uplink


@dataclass(frozen=True, slots=True)
class WeighedWay:
    """A way to train, and what the volunteers' lines and computers make of it."""

    way: TrainingWay
    samples: int  # samples that all compute between two rounds
    inner_batch_size: int  # samples of a peer's own step, if the way has some
    computing: float  # seconds
    sending: float  # seconds
    nbytes: float  # bytes that each peer brings to a round

    @property
    def sections(self) -> tuple[str, ...]:
        """The lines of a recipe that trains this way, beside `target_batch_size: {samples}`."""
        outer = f"outer: {{optimizer: sgd, inner_batch_size: {self.inner_batch_size}}}"
        codec = f"compression: {{gradients: {self.way.codec}}}"
        return (outer, codec) if self.way.steps > 1 else (codec,)

    def __str__(self) -> str:
        sends, computes = format_duration(self.sending), format_duration(self.computing)
        return f"{self.way.name}: {format_size(self.nbytes)}, {sends} of sending beside {computes} of computing"


@dataclass(frozen=True, slots=True)
class Advice:
    """The ways in their order, up to the chosen one, which is last."""

    volunteers: Volunteers
    batch: int  # samples of a step with averaged gradients
    ways: tuple[WeighedWay, ...]

    @property
    def chosen(self) -> WeighedWay:
        return self.ways[-1]

    @property
    def lines(self) -> tuple[str, ...]:
        """The arithmetic, for people."""
        each, chosen = self.volunteers, self.chosen
        share = f"{SHARE:.0%} of the time of computing"
        why = f": the first whose sending takes at most {share}."
        if chosen.sending > SHARE * chosen.computing:
            why = f", though its sending takes more than {share}: no way sends less."
        return (
            f"{each.count} volunteers with {format_rate(each.uplink)} up and {each.pace:,.1f} samples a second each.",
            "In a round each sends its own numbers, and averages for the others: together "
            f"{each.sending(1) * each.uplink:.3g} times its own.",
            *(f"  {way}" for way in self.ways),
            f"The last line is chosen{why}",
        )


def advise(numbers: int, batch: int, micro_batch: int, volunteers: Volunteers) -> Advice:
    """Takes the first way whose sending fits beside its computing, otherwise the last.

    `numbers`: how many are trained. `batch`: samples of a step with averaged gradients. `micro_batch`: a peer's own
    step is a multiple of so many samples. With own steps, a step of all peers together has about `batch` samples.
    """
    inner = micro_batch * max(1, batch // (volunteers.count * micro_batch))
    ways: list[WeighedWay] = []
    for way in WAYS:
        samples = batch if way.steps == 1 else way.steps * inner * volunteers.count
        nbytes, computing = numbers * WIDTHS[way.codec], samples / (volunteers.count * volunteers.pace)
        ways.append(WeighedWay(way, samples, inner, computing, volunteers.sending(nbytes), nbytes))
        if ways[-1].sending <= SHARE * computing:
            break
    return Advice(volunteers, batch, tuple(ways))


def advise_on(recipe: Recipe, numbers: int, volunteers: Volunteers) -> Advice:
    """Advises on the run of a recipe that averages `numbers`."""
    step = recipe.outer.inner_batch_size * volunteers.count or recipe.target_batch_size
    return advise(numbers, step, recipe.micro_batch * recipe.accumulation_steps, volunteers)


def keys_to_write(recipe: Recipe, advice: Advice) -> list[str]:
    """Returns the lines that make a recipe train as advised; none: it does already."""
    chosen = advice.chosen
    if (recipe.target_batch_size, recipe.compression.gradients, recipe.outer.inner_batch_size) == (
        chosen.samples,
        chosen.way.codec,
        chosen.inner_batch_size if chosen.way.steps > 1 else 0,
    ):
        return []
    lines = [f"target_batch_size: {chosen.samples}"]
    if (epochs := _epochs(recipe, chosen)) != recipe.max_epochs:
        lines.append(f"max_epochs: {epochs}")
    return [*lines, *chosen.sections]


def _epochs(recipe: Recipe, way: WeighedWay) -> int | None:
    """The last epoch of the recipe's run, trained so; None: it has no end."""
    if not recipe.max_epochs or way.samples == recipe.target_batch_size:
        return recipe.max_epochs
    return max(LEAST_EPOCHS, int(recipe.max_epochs * recipe.target_batch_size / way.samples))


def time_to_the_end(recipe: Recipe, advice: Advice) -> list[str]:
    """Says how long the run takes, trained as advised; nothing of one without an end."""
    chosen = advice.chosen
    if not (epochs := _epochs(recipe, chosen)):
        return []
    # With own steps trainers go on during a round.
    seconds = max(chosen.computing, chosen.sending) if chosen.way.steps > 1 else chosen.computing + chosen.sending
    return [f"{epochs:,} epochs take about {format_duration(epochs * seconds)} then."]


def further_advice(recipe: Recipe, advice: Advice) -> list[str]:
    """Says in sentences what else to change with these keys."""
    chosen, told = advice.chosen, list[str]()
    if recipe.gradient_averaging.method != "plain":
        told.append("Remove gradient_averaging.")
    if recipe.outer.takes_steps and chosen.way.steps == 1:
        told.append("Remove outer.")
    if (fewer := chosen.samples / recipe.target_batch_size) != 1:
        # 0 stays: it means never
        kept = {key: max(1, round(value / fewer)) for key, value in _counted_in_epochs(recipe).items() if value}
        write = ", ".join(f"{key}: {value}" for key, value in kept.items())
        told.append(f"Epochs are {fewer:.3g} times as long then{write and ': write '}{write}.")
    if chosen.way.steps > 1 and recipe.optimizer.name == "adamw" and isinstance(recipe.base_model, Mapping):
        rate = f"{RATE_OF_MUON * recipe.optimizer.learning_rate:.1g}"
        told.append(f"With own steps a language model learns best with optimizer.name: muon and learning_rate: {rate}.")
    return told


def _counted_in_epochs(recipe: Recipe) -> dict[str, int | None]:
    """Returns the keys of a recipe, beside max_epochs, whose values are numbers of epochs."""
    schedule = recipe.lr_scheduler
    return {
        "lr_scheduler.warmup_epochs": schedule.warmup_epochs,
        "lr_scheduler.total_epochs": schedule.total_epochs,
        "lr_scheduler.decay_epochs": schedule.decay_epochs,
        "checkpoint.every_epochs": recipe.checkpoint.every_epochs,
        "evaluation.every_epochs": recipe.evaluation.every_epochs,
    }


def on_lines_of_homes(nbytes: float) -> str:
    """Says how long usual lines of homes take to send `nbytes`."""
    return ", ".join(f"{format_duration(8e-6 * nbytes / rate)} at {rate} Mbit/s" for rate in HOMES)
