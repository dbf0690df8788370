"""Draws the pictures of how-it-works.md.

    python -m docs.pictures docs

writes epoch.svg and round.svg into that directory.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable
from pathlib import Path

INK, QUIET, LINE, PAPER = "#1b1f24", "#57606a", "#0f6b5e", "#ffffff"
FILL, BAND = "#d7ece7", "#f3eedd"
PARTS = ("#d7ece7", "#dbe4f5", "#f5e3d0")  # A, B, C
TRAINERS = ("Ada", "Ben", "Cy")


def text(x: float, y: float, words: str, *, colour: str = INK, size: int = 12, anchor: str = "middle") -> str:
    place = f'x="{x}" y="{y}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, words: str = "", *, fill: str = FILL, size: int = 12) -> str:
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{LINE}"/>'
    return frame + (text(x + width / 2, y + height / 2 + 4, words, size=size) if words else "")


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" marker-end="url(#to)"/>'


def picture(width: int, height: int, says: str, pieces: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" '
        f'aria-label="{html.escape(says)}"><defs><marker id="to" markerWidth="8" markerHeight="8" refX="8" refY="4" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>{"".join(pieces)}</svg>\n'
    )


def epoch() -> str:
    """Two epochs of a target of 96 samples, and a newcomer that joins between them."""
    top, row, bar = 62, 44, 28
    begins, ends, steps = (110, 510), (410, 710), (490, 790)
    batches = {"Ada": (50, 8), "Ben": (100, 8), "Cy": (50, 4), "Dee": (75, 16)}  # seconds and samples of each batch
    bottom = top + row * len(batches)
    pieces = []
    for number in (0, 1):
        start, end, step = begins[number], ends[number], steps[number]
        pieces += [
            text((start + end) / 2, 28, f"epoch {number}: 96 samples", size=13),
            f'<rect x="{end}" y="{top - 10}" width="{step - end}" height="{bottom - top + 2}" fill="{BAND}"/>',
            text((end + step) / 2, 28, "round", size=13),
            text((end + step) / 2, 45, "one average", colour=QUIET),
            f'<line x1="{step}" y1="{top - 10}" x2="{step}" y2="{bottom + 8}" stroke="{LINE}" stroke-width="2.5"/>',
            text(step, bottom + 24, "all step", colour=LINE),
        ]
    for index, (name, (width, samples)) in enumerate(batches.items()):
        y = top + row * index
        pieces.append(text(20, y + 19, name, anchor="start", size=14))
        for number in (0, 1):
            first = begins[number]
            if name == "Dee":
                if number == 0:
                    pieces.append(box(250, y, 230, bar, "downloads the state of epoch 0", fill=PAPER))
                    continue
                first += 50
                pieces.append(box(494, y, first - 496, bar, "replays", fill=PAPER, size=11))
            for x in range(first, ends[number], width):
                pieces.append(box(x + 1, y, width - 2, bar, str(samples)))
    y = bottom + 50
    pieces.append(text(20, y + 19, "lineage", anchor="start", colour=QUIET))
    for x, words in ((110, "start: a3f…"), (405, "epoch 1: 7c0…"), (705, "epoch 2: e19…")):
        pieces.append(box(x, y, 120, bar, words, fill=PAPER))
    pieces += [arrow(230, y + 14, 405, y + 14), text(317, y + 8, "hash with the round", colour=QUIET, size=11)]
    pieces += [arrow(525, y + 14, 705, y + 14), text(614, y + 8, "hash with the round", colour=QUIET, size=11)]
    says = "Three trainers compute 96 samples; a round gives one average; all step. A newcomer joins."
    return picture(850, y + 48, says, pieces)


def round_() -> str:
    """Three members average one vector of three parts: each reduces one of them."""
    top, row, cell, bar = 74, 70, 46, 30
    pieces = [
        text(140, 28, "1. each has gradients", size=13),
        text(410, 28, "2. each reduces a part", size=13),
        text(660, 28, "3. all have the same average", size=13),
        text(410, 46, "weighted by samples", colour=QUIET),
        text(660, 46, "and vote for its hash", colour=QUIET),
    ]
    for index, name in enumerate(TRAINERS):
        y = top + row * index
        pieces.append(text(20, y + 20, name, anchor="start", size=14))
        for part, (letter, fill) in enumerate(zip("ABC", PARTS, strict=True)):
            pieces.append(box(70 + cell * part, y, cell, bar, f"{letter}{index + 1}", fill=fill))
            pieces.append(box(590 + cell * part, y, cell, bar, letter, fill=fill))
            pieces.append(arrow(212, y + bar / 2, 340, top + row * part + bar / 2))
            pieces.append(arrow(480, y + bar / 2, 586, top + row * part + bar / 2))
        letter = "ABC"[index]
        pieces.append(box(344, y, 134, bar, f"{letter}1 + {letter}2 + {letter}3", fill=PARTS[index]))
    y = top + row * len(TRAINERS) + 8
    pieces.append(text(410, y, "4. enough equal votes are a certificate: whoever has it steps", size=13))
    return picture(760, y + 20, "Each member sends parts to their reducers, gets all averages, and votes.", pieces)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / "epoch.svg").write_text(epoch(), encoding="utf-8")
    (directory / "round.svg").write_text(round_(), encoding="utf-8")
