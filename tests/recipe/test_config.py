from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmcli.errors import RecipeError
from swarmcli.recipe.config import config_file, keep_limits, load_config, parse_config

FILE = """\
# mine
name: Ada  # as on the dashboard
limits:
    upload: 2 MB/s   # the neighbours
    # at night
    hours: 22:00-08:00
team: Lovelace's
"""


def test_a_file_that_is_not_there_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CONFIG", str(tmp_path / "mine.yaml"))
    assert config_file() == tmp_path / "mine.yaml"
    assert load_config().limits.written == {} and load_config().name is None
    assert parse_config("# nothing\n\n", "mine").team is None


def test_it_says_who_and_how_much() -> None:
    config = parse_config(FILE, "mine.yaml")
    assert (config.name, config.team) == ("Ada", "Lovelace's")
    assert config.limits.written == {"upload": 2e6, "hours": "22:00-08:00"}
    assert config.origin("limits", "upload") == "mine.yaml:4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limits:\n  uplod: 3\n", "mine.yaml:2: unknown key limits.uplod; did you mean upload?"),
        ("limits:\n  upload: 3 apples\n", "mine.yaml:2: limits.upload: '3 apples' is no rate; write for example 2"),
        ("upload: 3 MB/s\n", "mine.yaml:1: unknown key upload; did you mean limits.upload?"),
        ("limits: [1]\n", "mine.yaml:1: limits should be a section"),
        ("just words\n", "mine.yaml:1: a configuration is a list of"),
    ],
)
def test_errors_name_file_line_key_and_fix(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        parse_config(text, "mine.yaml")
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        (FILE, {"upload": 5e5}, FILE.replace("2 MB/s", "500 kB/s")),
        (FILE, {"hours": ...}, FILE.replace("    hours: 22:00-08:00\n", "")),
        (FILE, {"on_battery": False}, FILE.replace("limits:\n", "limits:\n    on_battery: no\n")),
        (FILE, {"upload": None}, FILE.replace("2 MB/s", "none")),
        ("name: Ada", {"threads": 2}, "name: Ada\nlimits:\n  threads: 2\n"),
        ("", {"memory": 0.5}, "limits:\n  memory: 50%\n"),
        ("limits:\nname: Ada\n", {"temperature": 80.0}, "limits:\n  temperature: 80 °C\nname: Ada\n"),
        ("limits:\n  upload: 1 MB/s\n", {"upload": ...}, "limits:\n"),
        ("", {"upload": ...}, ""),
    ],
)
def test_a_limit_is_written_and_all_else_stays(
    before: str, changes: dict[str, Any], after: str, tmp_path: Path
) -> None:
    file = tmp_path / "below" / "config.yaml"
    if before:
        file.parent.mkdir()
        file.write_text(before)
    keep_limits(changes, file)
    assert file.read_text() == after


@pytest.mark.parametrize("text", ["limits: {upload: 1 MB/s}\n", "{name: Ada, limits: {threads: 1}}\n"])
def test_what_cannot_be_changed_by_lines_stays_as_it_was(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match="only you can change"):
        keep_limits({"memory": 0.5, "threads": ...}, file)
    assert file.read_text() == text
