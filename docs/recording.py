"""Records what somebody sees in a terminal, as a picture that moves.

    python -m docs.recording join docs/join.svg     # what a volunteer sees: the question, a pause, goodbye
    python -m docs.recording demo docs/demo.svg     # the whole of `swarm demo`

Each change of the screen becomes a frame of an SVG that any browser plays without a script. Who wants no motion sees
the last one.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyte

from tests.end_to_end.terminal import Terminal

COLUMNS, LINES = 92, 28
CELL, LINE = 8.4, 18  # pixels of a character
MARGIN = 14
SWARM = [sys.executable, "-m", "swarmcli"]
LEAST_SECONDS, MOST_SECONDS = 0.25, 3.0  # that a frame stays: nobody watches a computer think
LAST_SECONDS = 6.0
COLOURS = {
    "default": "#d8dee6",
    "green": "#7fd08a",
    "yellow": "#e5c76b",
    "brown": "#e5c76b",
    "cyan": "#6fc8d8",
    "red": "#ef8a80",
    "magenta": "#c9a0e0",
    "blue": "#86b4f0",
    "black": "#8a93a0",
}


@dataclass(frozen=True, slots=True)
class Frame:
    """The screen's lines as spans of SVG, and how long they stay."""

    lines: tuple[str, ...]
    seconds: float


class Recorder:
    """Keeps a frame for each change of a screen."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._shown: tuple[str, ...] = ()
        self._since = time.monotonic()

    def note(self, screen: pyte.Screen) -> None:
        lines, now = tuple(_spans(screen)), time.monotonic()
        if lines == self._shown or now - self._since < LEAST_SECONDS:
            return
        if self._shown:
            self.frames.append(Frame(self._shown, min(MOST_SECONDS, now - self._since)))
        self._shown, self._since = lines, now

    def end(self) -> list[Frame]:
        return [*self.frames, Frame(self._shown, LAST_SECONDS)]


def main(what: str, picture: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ada-") as place:
        environment = {
            "SWARM_RUNTIME_DIR": f"{place}/run",
            "SWARM_DATA_DIR": f"{place}/data",
            "SWARM_CONFIG": f"{place}/c",
        }
        if what == "demo":
            shown = "A terminal: swarm demo starts a run, kills a trainer, and compares the survivors' parameters"
            frames = record_demo(place, environment)
        else:
            shown = "A terminal: a volunteer joins a run, pauses, goes on and leaves"
            frames = record_volunteer(place, environment)
    picture.write_text(svg(frames, shown), encoding="utf-8")
    sys.stderr.write(f"{picture}: {len(frames)} frames, {picture.stat().st_size // 1024} KiB\n")


def record_demo(place: str, environment: dict[str, str]) -> list[Frame]:
    recorder = Recorder()
    with Terminal(
        [*SWARM, "demo"], columns=COLUMNS, lines=LINES, environment=environment, cwd=place, on_output=recorder.note
    ) as terminal:
        terminal.end(seconds=300)
        recorder.note(terminal.screen)
    return recorder.end()


def record_volunteer(place: str, environment: dict[str, str]) -> list[Frame]:
    subprocess.run([*SWARM, "init", f"{place}/night-shift", "--quiet"], check=True, capture_output=True)
    words = [*SWARM, "monitor", f"{place}/night-shift/recipe.yaml", "--web", "0", "--port", "0"]
    with Terminal(words, columns=400, environment=environment) as monitor:
        found = re.search(r'swarm join "(\S+)"', monitor.until(lambda text: "swarm join" in text))
        assert found is not None
        return record(found[1], environment)


def record(link: str, environment: dict[str, str]) -> list[Frame]:
    """The question, some epochs, a pause, and goodbye."""
    recorder = Recorder()
    words = [*SWARM, "join", link, "--name", "Ada", "--upload", "5MB/s"]
    with Terminal(words, columns=COLUMNS, lines=LINES, environment=environment, on_output=recorder.note) as terminal:
        terminal.until(lambda text: "Train along?" in text)
        terminal.watch(2.0)
        terminal.type("y\r")
        terminal.until(lambda text: re.search(r"epoch [5-9] of", text))
        subprocess.run([*SWARM, "pause", "--for", "2h", "--quiet"], env={**os.environ, **environment}, check=True)
        terminal.until(lambda text: "Paused" in text)
        terminal.watch(2.0)
        subprocess.run([*SWARM, "resume", "--quiet"], env={**os.environ, **environment}, check=True)
        terminal.watch(5.0)
        terminal.type("\x03")
        terminal.end()
        recorder.note(terminal.screen)
    return recorder.end()


def _spans(screen: pyte.Screen) -> Iterator[str]:
    for row in range(LINES):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        text, spans = "".join(cell.data for cell in cells).rstrip(), []
        begin = 0
        for column in range(1, len(text) + 1):
            style = (cells[begin].fg, cells[begin].bold)
            if column == len(text) or (cells[column].fg, cells[column].bold) != style:
                spans.append(_span(text[begin:column], *style))
                begin = column
        yield "".join(spans)


def _span(text: str, colour: str, bold: bool) -> str:
    # Addresses of the computer on which this is recorded are nobody's business.
    text = re.sub(r"(?:\d{1,3}\.){3}\d{1,3}", "203.0.113.7", text)
    weight = ' font-weight="700"' if bold else ""
    fill = f"#{colour}" if re.fullmatch("[0-9a-f]{6}", colour) else COLOURS.get(colour, COLOURS["default"])
    return f'<tspan fill="{fill}"{weight}>{html.escape(text, quote=False)}</tspan>'


def svg(frames: list[Frame], shown: str) -> str:
    """Each frame is seen for its part of the whole; the last one where motion is not wanted."""
    width, height = round(COLUMNS * CELL + 2 * MARGIN), LINES * LINE + 2 * MARGIN
    total = sum(frame.seconds for frame in frames)
    rules, groups, begin = [], [], 0.0
    for number, frame in enumerate(frames):
        start, end = 100 * begin / total, 100 * (begin + frame.seconds) / total
        begin += frame.seconds
        rules.append(
            f"@keyframes f{number}{{0%{{opacity:0}}{start:.3f}%{{opacity:1}}{end:.3f}%{{opacity:0}}100%{{opacity:0}}}}"
            f".f{number}{{animation:f{number} {total:.2f}s step-end infinite}}"
        )
        lines = "".join(
            f'<text x="{MARGIN}" y="{MARGIN + LINE * row + 13}">{line}</text>'
            for row, line in enumerate(frame.lines)
            if line
        )
        groups.append(f'<g class="f f{number}{" last" if number == len(frames) - 1 else ""}">{lines}</g>')
    calm = "@media (prefers-reduced-motion:reduce){.f{animation:none}.last{opacity:1}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{shown}">'
        f"<style>text{{font:13px ui-monospace,Menlo,Consolas,monospace;white-space:pre}}.f{{opacity:0}}"
        f'{"".join(rules)}{calm}</style><rect width="100%" height="100%" rx="8" fill="#14171c"/>'
        f"{''.join(groups)}</svg>\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
