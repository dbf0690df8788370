from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmcli.cli.console import err
from swarmcli.cli.validate import validate
from swarmcli.errors import RecipeError
from tests.cli.typed import typed

RECIPE = """\
run_id: small
base_model: {model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16}
datasets:
  - {source: files, path: texts}
sequence_len: 16
target_batch_size: 8
local: {device: cpu}
"""

check = typed(validate)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text " * 5000)
    file = tmp_path / "small.yaml"
    file.write_text(RECIPE)
    return file


def test_quiet_says_only_what_is_wrong(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(err, "quiet", True)
    never = ["--set", "evaluation={every_epochs: 99, held_out: 0.1}", "--set", "max_epochs=20"]
    assert run(recipe, "--quick") == ""
    (note,) = run(recipe, "--quick", *never).splitlines()
    assert note.startswith("note: ") and "nothing is evaluated" in note


def run(*arguments: object) -> str:
    return check(*arguments).output


def test_a_recipe_in_order_is_told_with_what_is_in_it(recipe: Path) -> None:
    output = run(recipe, "--set", "max_epochs=7")
    assert f"{recipe} is in order\n" in output
    assert "run                   small\n" in output and "after epoch 7" in output
    assert "first batch           input_ids (8, 16)" in output and "parameters" in output
    assert re.search(r"^sending takes +[0-9]+ ms at 10 Mbit/s, [0-9]+ ms at 50 .*100 Mbit/s$", output, re.M)


def test_it_says_how_much_memory_a_trainer_needs_and_refuses_more_than_there_is(recipe: Path) -> None:
    assert re.search(r"^memory                about 56[0-9] MB of the .* of this machine's memory$", run(recipe), re.M)
    huge = "base_model={model_type: gpt2, n_layer: 96, n_head: 96, n_embd: 12288}"
    with pytest.raises(RecipeError, match=r"(?s)as a trainer it needs about .* TB  statistics of adamw"):
        run(recipe, "--set", huge)


def test_it_says_whether_the_recipe_can_travel_in_a_link(recipe: Path) -> None:
    assert "link                  brings the recipe to whoever joins\n" in run(recipe, "--quick")
    output = run(recipe, "--quick", "--set", f"datasets.0.path={recipe.parent / 'texts'}")
    assert "This run cannot be joined by a link: " in output
    assert "datasets.0.path leads out of the run's data directory" in output and "local.data_dir" in output
    assert "is in order as far as the file goes, for those who have the file" in output
    found = json.loads(run(recipe, "--json", "--quick", "--set", "datasets.0.path=~/x", "--set", "seed=9"))
    assert "cannot be joined" in found["no_link"] and "base_model.n_head" in found["fingerprint"]
    assert found["values"]["seed"] == 9 and found["values"]["optimizer"]["name"] == "adamw"
    (recipe.parent / "texts" / "a.txt").unlink()
    output = run(recipe, "--quick")
    assert "is in order as far as the file goes" in output and "parameters" not in output, "it looks at the file only"


def test_what_is_wrong_is_raised_for_the_command_to_show(recipe: Path) -> None:
    for override, words in (
        ("sede=9", "--set sede=9: unknown key sede; did you mean seed"),
        ("base_model.n_layers=9", "has no field 'n_layers'"),
        ("datasets.0.path=gone", r"datasets\.0: .*gone does not exist"),
        ("sequence_len=65536", r"\.yaml:\d+: all the text is shorter than one sequence of 65536 tokens"),
        ("base_model.n_head=-2", "base_model: this model cannot compute: .* n_head -2"),
    ):
        with pytest.raises(RecipeError, match=words):
            run(recipe, "--set", override, "--set", "local.check_memory=false")


def test_a_site_is_told_in_words(recipe: Path) -> None:
    output = run(recipe, "--quick", "--set", "local.site={processes: 4, zero: true}")
    assert "site                  4 processes as one peer, the optimizer's statistics shared among them\n" in output
    assert "site " not in run(recipe, "--quick")


CHATS = """\
run_id: chats
base_model: {model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16}
datasets:
  - {path: chats.jsonl, type: chat_template, streaming: false}
chat_template: chatml
sequence_len: 150
target_batch_size: 8
local: {device: cpu}
"""


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.yaml"
    file.write_text(CHATS)
    said = ["[bold]who[/bold]", "a\x1b[31m swarm", "x" * 5000]
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": each} for role, each in zip(roles, said, strict=True)]
    rows = [{"messages": messages}, {"messages": messages[:1]}, {"messages": None}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_sample_shows_what_is_learned_what_is_read_and_what_is_cut_off(chats: Path) -> None:
    output = run(chats)
    assert "datasets.0            3 rows looked at, 2 left out (chats.jsonl, row " in output
    assert "row 3: messages is None, and not a list of messages" in output and "1 cut at 150 tokens; a " in output
    assert (
        "sample of them («learned», only read, {cut off}):\n"
        "  <|im_start|>user\n"
        "  [bold]who[/bold]<|im_end|>\n"
        "  <|im_start|>assistant\n"
        "  «a[31m swarm<|im_end|>»\n"
    ) in output
    assert re.search(r"^  x+{x{300} \[…\] x+<\|im_end\|>\n  }$", output, re.M)
    (sample,) = json.loads(check(chats, "--json").stdout)["samples"]
    assert (sample["name"], sample["rows"]) == ("datasets.0", 3)
    assert [use for _, use in sample["sample"]] == ["read", "learned", "read", "cut"]


def test_it_tells_which_way_to_train_the_volunteers_lines_allow(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="--uplink: upload: 'quick' is no rate; write for example 2 MB/s"):
        run(recipe, "--uplink", "quick")
    # Micro-batches of 8 take 80 ms. The first takes more, and now and then another program disturbs one.
    took = (9.0 if n % 4 == 0 else 0.08 for n in itertools.count())
    ticks = itertools.accumulate(itertools.chain.from_iterable((0.0, each) for each in took))
    monkeypatch.setattr("swarmcli.training.pace.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    output = run(recipe, "--quick", "--set", "target_batch_size=64", "--uplink", "10kB/s", "--volunteers", "8")
    assert "8 volunteers with 80 kbit/s up and 100.0 samples a second each." in output
    assert re.search(r"  gradients in float32: [0-9.]+ kB, [0-9.]+ s of sending beside 80 ms of computing\n", output)
    assert "Write in the recipe:\n  target_batch_size: " in output and "  outer: {optimizer: sgd, " in output
    lines = re.search("Write in the recipe:\n((?:  .*\n)+)", output)
    assert lines is not None
    kept = "".join(line for line in RECIPE.splitlines(keepends=True) if not line.startswith("target_batch_size"))
    recipe.write_text(kept + re.sub("(?m)^  ", "", lines[1]))
    output = run(recipe, "--quick", "--uplink", "10kB/s", "--volunteers", "8")
    assert "The recipe trains so already." in output and "Write in" not in output
    assert json.loads(run(recipe, "--quick", "--json", "--uplink", "10kB/s"))["advice"][0].startswith("4 volunteers")
