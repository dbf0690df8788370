"""Draws how trainers, auxiliaries and a monitor stand to each other.

    python -m docs.roles docs/roles.svg

Each of the pieces below is a box or an arrow with its words; nothing is placed by hand elsewhere.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 880, 400
BOX_WIDTH, BOX_HEIGHT = 180, 76
INK, QUIET, LINE = "#1b1f24", "#57606a", "#0f6b5e"
PAPER, FILL, ACCENT = "#ffffff", "#eef6f4", "#d7ece7"


@dataclass(frozen=True, slots=True)
class Box:
    """A peer: its upper left corner, its name, and what it does in two lines."""

    x: int
    y: int
    name: str
    does: tuple[str, str]
    fill: str = FILL

    @property
    def middle(self) -> tuple[int, int]:
        return self.x + BOX_WIDTH // 2, self.y + BOX_HEIGHT // 2

    def svg(self) -> str:
        x, y = self.middle
        lines = "".join(
            f'<text x="{x}" y="{y + 6 + 16 * number}" fill="{QUIET}" font-size="12">{html.escape(line)}</text>'
            for number, line in enumerate(self.does)
        )
        return (
            f'<rect x="{self.x}" y="{self.y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" fill="{self.fill}" '
            f'stroke="{LINE}"/><text x="{x}" y="{y - 14}" fill="{INK}" font-size="15" font-weight="700">'
            f"{html.escape(self.name)}</text>{lines}"
        )


@dataclass(frozen=True, slots=True)
class Arrow:
    """What goes between two places, in one direction or in both; its words stand beside the line's middle."""

    start: tuple[int, int]
    end: tuple[int, int]
    words: str
    at: tuple[int, int]
    both: bool = True
    dashed: bool = False

    def svg(self) -> str:
        (x1, y1), (x2, y2) = self.start, self.end
        ends = ('marker-start="url(#from)" ' if self.both else "") + 'marker-end="url(#to)"'
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        return (
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.5" {ends}{dash}/>'
            f'<text x="{self.at[0]}" y="{self.at[1]}" fill="{INK}" font-size="12">{html.escape(self.words)}</text>'
        )


OWNER = Box(20, 40, "the owner", ("writes a recipe,", "sends a link"), PAPER)
MONITOR = Box(350, 40, "monitor", ("keeps checkpoints,", "serves the page"), ACCENT)
VOLUNTEER = Box(680, 40, "a newcomer", ("types", "swarm join LINK"), PAPER)
FIRST = Box(180, 270, "trainer", ("computes gradients,", "behind a home router"))
SECOND = Box(520, 270, "trainer", ("computes gradients,", "holds the whole model"))
AUXILIARY = Box(350, 155, "auxiliary", ("adds up gradients", "for slow lines"))

ARROWS = (
    Arrow((200, 78), (350, 78), "swarm monitor", (275, 68), both=False, dashed=True),
    Arrow((530, 78), (680, 78), "recipe and model", (605, 68), both=False),
    Arrow((290, 270), (380, 231), "gradients", (378, 264)),
    Arrow((590, 270), (500, 231), "averages", (504, 264)),
    Arrow((360, 308), (520, 308), "gradients, averages", (440, 298)),
    Arrow((350, 116), (250, 270), "averages, states", (232, 190)),
    Arrow((530, 116), (630, 270), "averages, states", (650, 190)),
)


def svg() -> str:
    pieces = "".join(each.svg() for each in (*ARROWS, OWNER, MONITOR, VOLUNTEER, FIRST, SECOND, AUXILIARY))
    head = f'<path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/>'
    back = f'<path d="M8,0 L0,4 L8,8 z" fill="{LINE}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" '
        'text-anchor="middle" aria-label="A monitor, trainers and an auxiliary exchange gradients, averages and '
        'states; a newcomer joins by a link">'
        f'<defs><marker id="to" markerWidth="8" markerHeight="8" refX="8" refY="4" orient="auto">{head}</marker>'
        f'<marker id="from" markerWidth="8" markerHeight="8" refX="0" refY="4" orient="auto">{back}</marker></defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>{pieces}'
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 18}" fill="{QUIET}" font-size="12">'
        "Nobody is the master: each of them may leave, and the others go on. A newcomer gets recipe and model from any "
        "peer.</text></svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg(), encoding="utf-8")
