"""The verbs of `swarm`, and its help, which is printed before anything large is imported."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import NamedTuple


class Verb(NamedTuple):
    """A verb as `swarm --help` shows it, and its module, which is imported when the verb is called."""

    where: str  # module:function in swarmcli.cli, or module:app for a verb with verbs of its own (a typer.Typer)
    panel: str
    help: str  # the first paragraph of its own help


_PANELS = {
    "Begin and join runs": {
        "init:init": "Begin a run of your own: write a recipe with comments, and for a closed run its key.",
        "peers:join": "Train with the others: compute gradients, average them, step together.",
        "peers:aux": "Help trainers: add up what they have computed; it needs no data and no graphics card.",
        "peers:monitor": "Follow the run without computing: serve the dashboard, keep checkpoints, hand out the state.",
        "link:link": "Print the link by which others join a run of this machine.",
        "demo:demo": "Train with a monitor, three trainers and an auxiliary on this machine; one of them is killed "
        "during the run.",
    },
    "Your peers on this computer": {
        "status:status": "Show what your peers on this computer do, and how their runs go.",
        "pausing:pause": "Let your peers on this computer pause: they hand in what they have computed, and "
        "leave the processor alone.",
        "pausing:resume": "Let your peers on this computer go on after a pause.",
        "pausing:stop": "Let your peers on this computer leave, once they have handed in what they have computed.",
        "service:app": "Start a peer whenever you log in, and again after a failure; on Linux it goes on after you "
        "log out.",
        "limits:app": "Show and set how much of this computer your peers may take, and when.",
        "doctor.verb:doctor": "Check all that a peer needs, and say of each fault what helps.",
        "contributions:certificate": "Write a certificate of what you gave, signed by a monitor of the run.",
    },
    "Look into runs and models": {
        "log:log": "Show what a peer went through: a summary, or the lists that are asked for.",
        "checkpoints:app": "Show the checkpoints on this computer, check that they are whole, and remove what need "
        "not stay.",
        "generate:generate": "Have a checkpoint's model continue a text: see what a run has learned.",
        "export:export": "Write what a peer saw of its run as tables, for spreadsheets and notebooks.",
        "validate:validate": "Check a recipe as `swarm join` would, without meeting peers; or the recipe of a link, "
        "without reading data.",
        "schema:schema": "Print the JSON schema of recipes, by which editors complete and check their keys.",
        "closed:members": "Show what each peer has given to a run; to the owner of a closed run also who takes "
        "part, by which invitation.",
    },
    "Own a closed run": {
        "closed:invite": "Make a link by which somebody joins a closed run.",
        "closed:revoke": "Take back invitations of a closed run: its members close all connections with those peers.",
        "closed:sign": "Sign a checkpoint with the run key: peers at an earlier epoch then follow a peer that "
        "begins with it.",
    },
}
VERBS = {
    where.removesuffix(":app").rpartition(":")[2]: Verb(where, panel, text)
    for panel, verbs in _PANELS.items()
    for where, text in verbs.items()
}
OLD_VERBS = {"netcheck": "swarm doctor [LINK|RECIPE] --network"}  # and what is written in their place


OPTIONS = {
    "-h, --help": "Show this; after a verb, what it does and its options.",
    "--version": "Show the version and exit.",
    "--install-completion": "Have your shell complete verbs and options.",
    "--show-completion": "Print the script that does so.",
}
WIDEST = 120  # columns


def help_text() -> str:
    """Returns the help, as wide as the terminal; headings are bold on a terminal that can show it."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    lines = ["Usage: swarm VERB [OPTIONS]", "", "Train one neural network together on computers that strangers lend."]
    panels = {panel: {name: verb.help for name, verb in VERBS.items() if verb.panel == panel} for panel in _PANELS}
    for panel, told in {**panels, "Options": OPTIONS}.items():
        room = max(map(len, told)) + 4
        lines += ["", f"\x1b[1m{panel}\x1b[0m" if bold else panel]
        for name, text in told.items():
            first = f"  {name}".ljust(room)
            lines += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * room)
    last = "An environment variable can set each option: SWARM_JOIN_NAME stands for --name of swarm join."
    return "\n".join([*lines, "", *textwrap.wrap(last, width)]) + "\n"
