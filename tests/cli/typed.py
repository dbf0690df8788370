"""Commands as they are typed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.testing import CliRunner, Result

Typed = Callable[..., Result]


def typed(*verbs: Callable[..., Any] | typer.Typer) -> Typed:
    """Runs these words of one verb, or the verb and its words of several; what a verb raises is raised."""
    app = typer.Typer()
    for verb in verbs:
        if isinstance(verb, typer.Typer):
            app = verb
        else:
            app.command()(verb)

    def run(*words: object, answers: str | None = None, code: int | None = 0) -> Result:
        done = CliRunner().invoke(app, [str(word) for word in words], input=answers, catch_exceptions=False)
        assert code is None or done.exit_code == code, done.output
        return done

    return run
