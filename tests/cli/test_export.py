"""`swarm export`: lists of a journal as tables."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from swarmcli.cli.export import export
from swarmcli.errors import UsageError
from swarmcli.events import Evaluated, Noticed, PeerSeen
from swarmcli.journal import JOURNAL_NAME, Journal
from swarmcli.run.tables import EXPORTS, csv_of, json_of
from tests.cli.typed import typed
from tests.journal.samples import RUN, Clock, averaging_round, epoch, seen

EVIL = '=HYPERLINK("http://evil")'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "data" / "stdlib-lm-abcdefgh" / "stdlib-lm" / "monitor-1"
    home.mkdir(parents=True)
    journal = Journal(home / JOURNAL_NAME, run=RUN, clock=Clock())
    for number in range(1, 4):
        journal.record(epoch(number))
        journal.record(averaging_round(number))
    journal.record(Evaluated(2, 1.25, 64))
    journal.record(seen(name=EVIL))
    journal.record(Noticed("info", "-1+1"))
    journal.close()
    return home


run = typed(export)


def said(*words: str) -> str:
    return run(*words).stdout


def test_a_list_goes_to_stdout_and_all_of_them_to_a_directory(home: Path, tmp_path: Path) -> None:
    assert [row["epoch"] for row in csv.DictReader(io.StringIO(said("--what", "epochs")))] == ["1", "2", "3"]
    (row,) = json.loads(said("stdlib-lm", "--what", "peers", "--format", "json"))
    assert row["name"] == EVIL
    said(str(home), "--output", "tables")
    assert sorted(file.name for file in (tmp_path / "tables").iterdir()) == sorted(f"{name}.csv" for name in EXPORTS)
    (row,) = csv.DictReader((tmp_path / "tables" / "peers.csv").open())
    assert row["name"] == f"'{EVIL}"
    events = list(csv.DictReader((tmp_path / "tables" / "events.csv").open()))
    assert events[-1]["text"] == "'-1+1"
    (row,) = csv.DictReader((tmp_path / "tables" / "evaluations.csv").open())
    assert (row["epoch"], row["loss"], row["samples"]) == ("2", "1.25", "64")
    for words, reason in (((), "--what"), (("nowhere", "--what", "epochs"), "no peer of the run nowhere")):
        with pytest.raises(UsageError, match=reason):
            said(*words)
    said("--what", "rounds", "-o", "rounds.csv")
    assert len((tmp_path / "rounds.csv").read_text().splitlines()) == 4


def test_no_name_is_a_formula_also_where_semicolons_split_lines_and_json_is_whole() -> None:
    for name in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "  =1", "\uff1d1"):
        text = b"".join(csv_of(PeerSeen, [seen(name=name)])).decode()
        told = next(csv.DictReader(io.StringIO(text, newline="")))["name"]
        assert re.sub("(?<=[\t\r\n])'", "", told) == f"'{name}"
    text = b"".join(csv_of(PeerSeen, [seen(name="a;=1+1;b")])).decode()
    (cells,) = list(csv.reader(io.StringIO(text), delimiter=";"))[1:]
    assert not any(cell.startswith("=") for cell in cells)
    assert json.loads(b"".join(json_of(PeerSeen, []))) == []
    odd = replace(seen(name="é"), samples_per_second=float("inf"))
    (first, second) = json.loads(b"".join(json_of(PeerSeen, [odd, odd])))
    assert first == second and first["name"] == "é" and first["samples_per_second"] is None
