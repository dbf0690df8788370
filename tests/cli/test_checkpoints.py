from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmcli.checkpoints.directory import CheckpointDirectory, Keep
from swarmcli.cli.checkpoints import NONE_HERE, app
from swarmcli.errors import CheckpointError
from tests.checkpoints.small_checkpoints import put
from tests.cli.typed import typed
from tests.recipe.recipes import SMALL

invoke = typed(app)


def run(*words: str) -> str:
    return invoke(*words).stdout


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Checkpoints of two peers in `runs`, where the command is given."""
    for peer, epochs in (("monitor-1", (10, 20, 30)), ("trainer-1", (25,))):
        checkpoints = CheckpointDirectory(tmp_path / "runs" / "small" / peer / "checkpoints", Keep(1, 0, 1))
        for epoch in epochs:
            put(checkpoints, epoch, 100.0 / epoch if epoch != 30 else 9.0, "small")
        checkpoints.mend()
    return tmp_path / "runs"


def test_a_list_says_what_there_is_and_why_it_stays(runs: Path) -> None:
    lines = run("list").splitlines()
    assert lines[0] == f"small: {runs}/small/monitor-1/checkpoints"
    assert [line.split()[0] for line in lines[2:5]] == ["30", "20", "10"]
    assert lines[1].split()[-3:] == ["stays", "as", "link"] and lines[4].split()[-1] == "no"
    assert [line.split()[-2:] for line in lines[2:4]] == [["newest", "latest"], ["best", "best"]]
    assert lines[3].split()[-3] == "5.0000"
    found = json.loads(run("list", "--json", "runs/small/trainer-1"))
    assert [(info["epoch"], info["kept"], info["problem"]) for info in found] == [(25, ["newest", "best"], "")]


def test_what_is_damaged_is_named_and_ends_with_one(runs: Path) -> None:
    assert run("verify").count("whole") == 4
    (runs / "small/monitor-1/checkpoints/epoch-000020/model.safetensors").write_bytes(b"weighed")
    ended = invoke("verify", "--quiet", "runs", code=1)
    assert ended.stdout.count("DAMAGED") == 1 and "whole" not in ended.stdout
    assert "model.safetensors is damaged: its content is not what was written" in ended.stdout


def test_what_need_not_stay_goes_by_the_rules_of_its_writer_or_by_others(runs: Path) -> None:
    checkpoints = CheckpointDirectory(runs / "small/monitor-1/checkpoints")
    assert "would go" in run("prune", "--dry-run") and len(checkpoints.all()) == 3
    assert run("prune") == f"removed  {checkpoints.path}/epoch-000010\n"
    assert invoke("prune", "--dry-run").stderr.startswith("nothing to remove")
    removed = json.loads(run("prune", "--json", "--keep-best", "0", str(checkpoints.path)))
    assert [info["epoch"] for info in removed] == [20] and [path.name for path in checkpoints.all()] == ["epoch-000030"]


def test_where_there_is_none_it_says_where_it_looked(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    ended = invoke("list")
    assert (ended.exit_code, ended.stdout) == (0, "") and NONE_HERE in ended.output
    with pytest.raises(CheckpointError, match=r"below \./runs or \./\*/runs; give the path"):
        invoke("verify")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of the run nowhere is on this computer; there are some of: none"
    ):
        invoke("list", "nowhere")


def test_runs_are_found_by_their_ids_and_where_they_were_joined_or_made(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(CheckpointDirectory(runs / "other" / "monitor-1" / "checkpoints"), 5, 1.0, "other")
    assert [info["epoch"] for info in json.loads(run("list", "--json", "other"))] == [5]
    (tmp_path / "small.yaml").write_text(SMALL)
    for named in ("small", str(tmp_path / "small.yaml")):
        assert {info["run_id"] for info in json.loads(run("verify", "--json", named))} == {"small"}
    with pytest.raises(CheckpointError, match="run smal is on this computer; there are some of: other, small"):
        run("list", "smal")
    for epoch, home in ((7, "at-home/small/runs/small/monitor-1"), (8, "data/small-abc/small/trainer-1")):
        put(CheckpointDirectory(tmp_path / home / "checkpoints"), epoch, run_id="small")
        monkeypatch.chdir(tmp_path / home.partition("/")[0])
        assert epoch in [info["epoch"] for info in json.loads(run("list", "--json"))]
