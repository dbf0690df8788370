"""What liars among the members cost in learning: one aggregator beside the other, attack by attack.

A byte-level language model on Python's own sources, trained by 4, 8 or 16 members of whom 1, 3, 3 or 7 lie about their
gradients (`_liars.py`). What is printed is the loss on sources that nobody trains on, beside that of a run of as many
honest members that average; a picture of the curves at 3 of 16 goes to a file.

    python -m benchmarks.liars [--picture FILE.svg] [--keep FILE.json] [--outer]

With `--outer` 5 of 16 members lie about differences of outer steps instead, of eight inner steps each.

What `--keep` names is read first, if it is there, and written after each case: what is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks._liars import ATTACKS, EPOCHS, Case, train
from swarmcli.averaging.aggregators import Aggregator, CenteredClip, Mean, Median, TrimmedMean
from swarmcli.averaging.aggregators.base import PartAggregator, norm
from swarmcli.averaging.aggregators.centered_clip import weighted_sum
from swarmcli.averaging.aggregators.median import CollectedPart

GROUPS = ((1, 4), (3, 8), (3, 16), (7, 16))  # liars, members
SHOWN = (3, 16)  # the group that the picture shows
MOMENTUM = 0.9
AGGREGATORS: dict[str, tuple[Aggregator, float]] = {  # and the momentum of members
    "mean": (Mean(), 0.0),
    "median": (Median(), 0.0),
    "trimmed mean": (TrimmedMean(), 0.0),
    "centered clip": (CenteredClip(), 0.0),
    "centered clip, momentum": (CenteredClip(), MOMENTUM),
}
OUTER, STEPS = (5, 16), 8  # liars, members; inner steps of an outer one


class NormClip(Aggregator):
    """The weighted mean of the members' parts, each clipped to the median of their norms; for comparison."""

    description = "norm_clip"

    def part(self, memory: torch.Tensor, senders: int, *, ordered: bool = False) -> PartAggregator:
        return CollectedPart(memory, self._combine)

    @staticmethod
    def _combine(rows: list[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> torch.Tensor:
        norms = [norm(row) for row in rows]
        most = sorted(norms)[(len(rows) - 1) // 2]
        shares = [weight / math.fsum(weights) for weight in weights]
        clipped = [share * min(1.0, most / each) if each else share for share, each in zip(shares, norms, strict=True)]
        return weighted_sum(rows, clipped, out)


OUTER_AGGREGATORS: dict[str, Aggregator] = {
    "mean": Mean(),
    "norm clip": NormClip(),
    "centered clip": CenteredClip(),
    "trimmed mean": TrimmedMean(),
    "median": Median(),
}
COLOURS = ("#c0392b", "#8e44ad", "#d68910", "#1e8449", "#2471a3")
Curves = dict[str, list[float]]  # by name of the case


def cases() -> Iterator[tuple[str, Case]]:
    """Yields cases with their names; those of the group that the picture shows come first."""
    for liars, members in sorted(GROUPS, key=lambda group: group != SHOWN):
        yield named("", "mean", 0, members)
        for name in compared(liars, members):
            for attack in ATTACKS:
                yield named(attack, name, liars, members)
            if (liars, members) == SHOWN:
                yield named("", name, 0, members)


def outer_cases() -> Iterator[tuple[str, Case]]:
    for name, aggregator in OUTER_AGGREGATORS.items():
        for attack in ("", *ATTACKS):
            liars = OUTER[0] if attack else 0
            yield key(attack, name, liars, OUTER[1]), Case(aggregator, attack, liars, OUTER[1], steps=STEPS)


def compared(liars: int, members: int) -> list[str]:
    """The names of the aggregators for these members: momentum is tried in the group that the picture shows alone."""
    return [name for name in reversed(AGGREGATORS) if (liars, members) == SHOWN or name != "centered clip, momentum"]


def named(attack: str, name: str, liars: int, members: int) -> tuple[str, Case]:
    aggregator, momentum = AGGREGATORS[name]
    return key(attack, name, liars, members), Case(aggregator, attack, liars, members, momentum=momentum)


def key(attack: str, name: str, liars: int, members: int) -> str:
    return f"{attack or 'honest'}; {name}; {liars} of {members}"


def run(kept: Path | None, cases: Iterator[tuple[str, Case]]) -> Curves:
    curves: Curves = {}
    if kept is not None and kept.exists():
        curves = {name: [float(loss) for loss in curve] for name, curve in json.loads(kept.read_text()).items()}
    wanted = {name: case for name, case in cases if name not in curves}
    with ProcessPoolExecutor(2) as pool:
        for name, curve in zip(wanted, pool.map(train, wanted.values()), strict=True):
            curves[name] = curve
            print(f"{name}: {curve[-1]:.3f}", file=sys.stderr, flush=True)
            if kept is not None:
                kept.write_text(json.dumps({each: [str(loss) for loss in losses] for each, losses in curves.items()}))
    return curves


def table(curves: Mapping[str, Sequence[float]]) -> str:
    """Loss beyond that of honest members, for each attack and group."""
    lines = [f"| liars | attack | {' | '.join(AGGREGATORS)} |", f"| --- | --- |{' --- |' * len(AGGREGATORS)}"]
    for liars, members in GROUPS:
        honest = curves[key("", "mean", 0, members)][-1]
        for attack in ATTACKS:  # what has not been run yet is left empty
            found = [curves.get(key(attack, name, liars, members)) for name in AGGREGATORS]
            losses = ["" if curve is None else beyond(curve[-1], honest) for curve in found]
            lines.append(f"| {liars} of {members} | {attack} | {' | '.join(losses)} |")
    honest = curves[key("", "mean", 0, SHOWN[1])][-1]
    calm = [curves[key("", name, 0, SHOWN[1])][-1] for name in AGGREGATORS]
    lines.append(f"| 0 of {SHOWN[1]} | | {' | '.join(beyond(each, honest) for each in calm)} |")
    return "\n".join(lines)


def outer_table(curves: Mapping[str, Sequence[float]]) -> str:
    """The same for outer steps."""
    lines = [f"| attack | {' | '.join(OUTER_AGGREGATORS)} |", f"| --- |{' --- |' * len(OUTER_AGGREGATORS)}"]
    honest = curves[key("", "mean", 0, OUTER[1])][-1]
    for attack in ("", *ATTACKS):
        liars = OUTER[0] if attack else 0
        losses = [beyond(curves[key(attack, name, liars, OUTER[1])][-1], honest) for name in OUTER_AGGREGATORS]
        lines.append(f"| {attack or 'none'} | {' | '.join(losses)} |")
    return "\n".join(lines)


def beyond(loss: float, honest: float) -> str:
    if not math.isfinite(loss) or loss > 2 * honest:
        return "lost"
    return f"{(loss / honest - 1) * 100:+.1f}%".replace("-", "−")


# The picture

WIDTH, HEIGHT, MARGIN, COLUMNS = 250, 150, 34, 3
TOP, BOTTOM = 5.5, 2.5  # nats per byte


def picture(curves: Mapping[str, Sequence[float]]) -> str:
    rows = -(-len(ATTACKS) // COLUMNS)
    width, height = COLUMNS * (WIDTH + MARGIN) + MARGIN, rows * (HEIGHT + MARGIN) + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    honest = curves[key("", "mean", 0, SHOWN[1])]
    for index, attack in enumerate(ATTACKS):
        x = MARGIN + index % COLUMNS * (WIDTH + MARGIN)
        y = MARGIN + index // COLUMNS * (HEIGHT + MARGIN)
        parts += panel(x, y, attack)
        for name, colour in zip(AGGREGATORS, COLOURS, strict=True):
            parts.append(line(x, y, curves[key(attack, name, *SHOWN)], f'stroke="{colour}" stroke-width="1.5"'))
        parts.append(line(x, y, honest, 'stroke="black" stroke-dasharray="3 2"'))
    return "\n".join([*parts, *legend(rows), "</svg>"]) + "\n"


def panel(x: float, y: float, title: str) -> list[str]:
    parts = [f'<text x="{x}" y="{y - 6}">{title}</text>']
    for loss in (3, 4, 5):
        level = y + HEIGHT * (TOP - loss) / (TOP - BOTTOM)
        parts.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{level:.1f}" y2="{level:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 10}" y="{level + 4:.1f}" fill="#777">{loss}</text>')
    return [*parts, f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']


def line(x: float, y: float, curve: Sequence[float], style: str) -> str:
    """Draws a curve; what leaves the panel stays at its edge."""
    points = []
    for index, loss in enumerate(curve):
        shown = min(max(loss, BOTTOM), TOP)
        across, down = x + WIDTH * (index + 1) / len(curve), y + HEIGHT * (TOP - shown) / (TOP - BOTTOM)
        points.append(f"{across:.1f},{down:.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" {style}/>'


def legend(rows: int) -> list[str]:
    y, parts = MARGIN + rows * (HEIGHT + MARGIN), []
    names = [("honest members, mean", "black"), *zip(AGGREGATORS, COLOURS, strict=True)]
    for index, (name, colour) in enumerate(names):
        x = MARGIN + index * 138
        parts.append(f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 22}" y="{y}">{name}</text>')
    caption = f"nats per byte over {EPOCHS} epochs, {SHOWN[0]} liars of {SHOWN[1]}"
    return [*parts, f'<text x="{MARGIN}" y="{y + 22}" fill="#777">{caption}</text>']


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.liars")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--outer", action="store_true")
    options = parser.parse_args(arguments)
    if options.outer:
        print(outer_table(run(options.keep, outer_cases())))
        return
    curves = run(options.keep, cases())
    print(table(curves))
    if options.picture is not None:
        options.picture.write_text(picture(curves), encoding="utf-8")
    honest = curves[key("", "mean", 0, SHOWN[1])][-1]
    losses = {attack: curves[key(attack, "centered clip", *SHOWN)][-1] for attack in ATTACKS}
    worst = max(losses, key=lambda attack: losses[attack])
    print(f"centered clip, {SHOWN[0]} of {SHOWN[1]}: at worst {beyond(losses[worst], honest)} ({worst})")


if __name__ == "__main__":
    main(sys.argv[1:])
