"""What each has given, in a run of real processes: counted by monitors, one of which comes later; shown by commands."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

import pytest

from swarmcli.journal import JournalReader
from tests.end_to_end import forked
from tests.end_to_end.swarm import Swarm

pytestmark = pytest.mark.e2e


def test_monitors_count_what_each_gives_and_a_later_one_says_the_same(swarm: Callable[..., Swarm]) -> None:
    run = swarm(10, target=2048)  # a monitor reads every two seconds who is there

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "160", "SWARM_DATA_DIR": str(run.directory / "data")}
        return forked.command(words, environment, run.directory)

    def members(*words: str) -> dict[str, object]:
        found = command("members", str(run.recipe), "--peer", run.contact, "--json", *words)
        assert found.returncode == 0, found.stderr
        return dict(json.loads(found.stdout))

    monitor = run.start_monitor()
    trainers = [run.start("join", name, "--set", "local.team=reds") for name in ("Ada", "Bob")]
    run.wait_for_epoch("Ada", 4, monitor, *trainers)
    later = run.start_monitor(name="later")
    for trainer in trainers:
        run.wait_for_end(trainer)
    given = {name: sum(epoch.own_samples for epoch in run.epochs(name)) for name in ("Ada", "Bob")}

    def counted(name: str) -> dict[str, int]:
        with JournalReader(run.home(name) / "journal.sqlite") as journal:
            return {line.name: line.samples for line in journal.book("test-run")[1] if line.samples}

    run.wait(
        lambda: sorted(counted("monitor").values()) == sorted(given.values()), "the first monitor has all", monitor
    )
    run.wait(lambda: sorted(counted("later").values()) == sorted(given.values()), "the later one too", later)

    shown = members()
    people = {each["name"]: each for each in shown["contributions"]}  # type: ignore[attr-defined]
    assert {name: people[name]["samples"] for name in given} == given
    assert all(people[name]["team"] == "reds" for name in given)
    assert len(shown["monitors"]) == 2  # type: ignore[arg-type]
    (team,) = shown["teams"]  # type: ignore[misc]
    assert (team["team"], team["peers"], team["samples"]) == ("reds", 2, sum(given.values()))  # type: ignore[index]
    table = command("members", str(run.recipe), "--peer", run.contact)
    assert "Ada" in table.stdout and "claimed" in table.stdout and "seen" in table.stdout

    assert "thank you" in trainers[0].last_words(10)
    assert f"{given['Ada']:,} of " in trainers[0].last_words(10)
    written = command("certificate", "--home", str(run.home("Ada")), "--for", "Ada Lovelace", "--out", "ada.json")
    assert written.returncode == 0, written.stderr
    checked = command("certificate", "verify", "ada.json")
    assert checked.returncode == 0 and "Ada Lovelace" in checked.stdout and f"{given['Ada']:,} of" in checked.stdout
    file = run.directory / "ada.json"
    file.write_text(file.read_text().replace("Ada Lovelace", "Eve Lovelace"))
    forged = command("certificate", "verify", "ada.json")
    assert forged.returncode == 1 and "has not signed it" in forged.stderr
