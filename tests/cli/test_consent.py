"""What somebody who joins by a link is shown and asked."""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from torch import nn

from swarmcli.cli import consent, linking
from swarmcli.cli.linking import RecipeToJoin, recipe_named
from swarmcli.cli.validate import validate
from swarmcli.errors import RecipeError, UsageError
from swarmcli.network.identity import Identity
from swarmcli.optim.config import Role
from swarmcli.peer.linked import LinkedRun
from swarmcli.peer.offering import RecipeOffered
from swarmcli.recipe import Link, Recipe, digest_of, load_recipe, offered, parse_recipe, read_offered
from swarmcli.recipe.link import is_link
from swarmcli.recipe.offered import UNKNOWN, RunEstimate
from swarmcli.training.demand import demand_of
from tests.cli.typed import typed
from tests.recipe.recipes import SMALL, small

RECIPES = Path(__file__).parents[2] / "recipes"
ROLES: tuple[Role, ...] = ("trainer", "auxiliary", "monitor")
OUTLINE = nn.Linear(100, 200, device="meta")
LINK = Link(Identity.from_seed(1).peer_id, ("203.0.113.7:31330",), "small", digest_of(small()))


def sheet(recipe: Recipe, role: Role = "trainer", going: RunEstimate = UNKNOWN) -> dict[str, str]:
    demand = demand_of(recipe, OUTLINE, role, going)
    lines = consent.sheet(recipe, role, demand, "1 GiB of 8 GiB", Path("/data/small"), recipe.local.limits)
    shown = io.StringIO()
    consent.show(recipe, "k7q2m4xw5z", lines, Console(file=shown, width=100))
    assert "\x1b" not in shown.getvalue() and "small" in shown.getvalue()
    return dict(lines)


def data(*items: object, more: str = "") -> Recipe:
    values = json.loads(offered(small())) | {"datasets": list(items)}
    return parse_recipe(json.dumps(values), [more] if more else [], directory=Path("/data/small"))


def test_a_dozen_lines_say_what_will_happen() -> None:
    lines = sheet(small("local.threads=2"), going=RunEstimate(30.0))
    assert len(lines) <= 14
    assert "passes on" not in lines["traffic"] and "--no-port-mapping" in lines["router"]
    assert "a gpt2 model of 20,200 parameters that predicts text; an epoch is 32 samples of all" in lines["model"]
    assert "standard library, on this computer" in lines["data"]
    assert "2 threads" in lines["processor"]
    assert "19 MB an hour each way; an epoch in 30 s, as the contact says" in lines["traffic"]
    assert sheet(small())["traffic"].startswith(
        "at most 162 kB an epoch each way; nobody knows yet how long an epoch takes: 9.7 MB an hour if it takes "
        "a minute, 582 MB if it takes a second"
    )
    # 20,200 numbers of 4 bytes each way, an epoch shortened to 18 s by this trainer: 200 of them
    told = sheet(small(), going=RunEstimate(36.0, trainers=1))["traffic"]
    assert "about 16 MB an hour up and 16 MB an hour down" in told and "as the contact says" in told
    unpaced = sheet(small(), going=RunEstimate(0.0, trainers=1, monitors=1))["traffic"]
    assert "an hour if it takes a minute" in unpaced and " up and " in unpaced.partition("epoch takes: ")[2]
    assert "/data/small" in lines["files"] and "Ctrl-C" in lines["leaving"]


def test_the_question_says_what_a_limit_leads_to() -> None:
    rule = "your samples do not count, and swarm says so"
    assert sheet(small())["line"].endswith(f"if your line is too slow for that, {rule}")
    limited = small("local.limits={upload: 5 kB/s}")
    within = f"your limit of 5.0 kB/s needs 16 s for that; if the others are faster without you, {rule}"
    assert sheet(limited)["line"].endswith(within)
    limits_it = sheet(limited, going=RunEstimate(2.0))["line"]
    assert "epochs take 2 s: your samples cannot count here, unless all others are on this computer" in limits_it
    assert "line" not in sheet(limited, "monitor"), "it sends no gradients"


def test_weights_that_are_not_trained_are_a_download_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sheet(small())
    assert "not trained" not in whole["download"]
    monkeypatch.setattr(OUTLINE.weight, "requires_grad", False)
    lines = sheet(small())
    assert "the weights that are not trained, once, if this computer lacks them: 80 kB" in lines["download"]
    assert "at most 1.6 kB an epoch each way" in lines["traffic"]
    assert "not trained" not in sheet(small(), "auxiliary")["download"]


def test_the_room_on_the_disk_is_told_and_limits_or_how_to_set_them() -> None:
    assert sheet(small())["disk"].endswith(" are free")
    assert "swarm limits set" in sheet(small())["limits"]
    limits = sheet(small("local.limits={upload: 2 MB/s, hours: 22-8, on_battery: no, processor: 50%}"))["limits"]
    assert limits == "sends at most 2 MB/s; the processors compute 50% of the time; runs 22-8; pauses on battery"


def test_who_computes_nothing_reads_nothing() -> None:
    assert sheet(small(), "auxiliary")["data"] == "none"
    assert sheet(small(), "auxiliary")["download"] == "nothing"
    assert "passes on others' connections, at most 32 MB a second" in sheet(small(), "auxiliary")["traffic"]
    assert "at most 1.0 MB a second" in sheet(small("local.relay_rate=1e6"), "monitor")["traffic"]
    assert "passes on" not in sheet(small("local.relay=false"), "monitor")["traffic"]
    for more in ((), ("local.relay=true",)):
        assert "passes on" not in sheet(small("local.client_mode=true", *more), "auxiliary")["traffic"]
    assert "the model as it is now" in sheet(small(), "monitor")["download"]


def test_a_monitor_says_what_it_reads_to_evaluate() -> None:
    held_out = small("evaluation={every_epochs: 5, held_out: 0.1}")
    assert sheet(held_out, "monitor")["data"].startswith("for evaluations alone: the source files of Python's standard")
    assert sheet(held_out, "auxiliary")["data"] == sheet(small(), "monitor")["data"] == "none"
    split = "evaluation={every_epochs: 5, dataset: {source: huggingface, path: a/b, split: validation}}"
    assert "the dataset a/b (validation) from huggingface.co" in sheet(small(split), "monitor")["data"]


def test_data_are_told_by_where_they_come_from() -> None:
    files = {"source": "files", "path": "texts", "glob": "**/*.md"}
    assert "**/*.md below /data/small/texts" in sheet(data(files))["data"]
    assert "below /mine/texts" in sheet(data(files, more="local.data_dir=/mine"))["data"]
    hub = {"source": "huggingface", "path": "a/b", "name": "c"}
    assert "the dataset a/b (c, train) from huggingface.co" in sheet(data(hub))["data"]
    assert "about 16 B for each sample" in sheet(data(hub))["download"]  # of 16 tokens
    assert "all of a/b before training" in sheet(data({**hub, "streaming": False}))["download"]
    web = {"source": "huggingface", "path": "json", "data_files": ["https://example.org/a.jsonl"]}
    assert "https://example.org/a.jsonl" in sheet(data(web))["data"]
    steering = sheet(data({**files, "glob": "\x1b[2J*\u202e"}))["data"]
    assert "\x1b" not in steering and "\u202e" not in steering


def of_files(directory: Path) -> Recipe:
    files: list[object] = [
        {"source": "files", "path": "texts"},
        {"source": "huggingface", "path": "json", "data_files": ["rows/*.jsonl", "https://example.org/a.jsonl"]},
        {"source": "huggingface", "path": "a/b", "data_files": ["of-the-hub.jsonl"]},
    ]
    return data(*files, more=f"local.data_dir={directory}")


def test_data_that_are_not_here_are_told(tmp_path: Path) -> None:
    lines = sheet(of_files(tmp_path))["data"]
    assert f"; nothing lies at {tmp_path}/texts, {tmp_path}/rows/" in lines and "hub.jsonl, " not in lines
    assert "a/b (train, of-the-hub.jsonl) from huggingface.co" in lines


def test_a_trainer_without_the_data_is_refused_before_it_waits_for_the_page(
    contact: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contact.recipe = of_files(tmp_path)
    link, set_here = str(replace(LINK, fingerprint=digest_of(contact.recipe))), [f"local.data_dir={tmp_path}"]
    with pytest.raises(RecipeError, match=f"nothing is at {tmp_path}/texts, {tmp_path}/rows/.*local.data_dir=DIR"):
        recipe_named(link, "trainer", set_here, yes=True)
    assert contact.shown == 0 and not LinkedRun(replace(LINK)).path.exists()
    with pytest.raises(RecipeError, match="no data come by a link"):
        typed(validate)(link, "--set", *set_here)
    recipe_named(link, "auxiliary", set_here, yes=True)
    for name in ("texts", "rows"):
        (tmp_path / name).mkdir()
    recipe_named(link, "trainer", set_here, yes=True)
    assert contact.shown == 3
    (tmp_path / "texts").rmdir()
    with pytest.raises(RecipeError, match=f"nothing is at {tmp_path}/texts; "):
        recipe_named(link, "trainer", set_here, yes=True)


def test_a_trainer_of_a_file_hears_of_absent_data_at_once_and_others_start(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(SMALL)
    gone = [f"datasets=[{{path: {tmp_path}/gone}}]"]
    with pytest.raises(RecipeError, match=f"nothing is at {tmp_path}/gone; .* by --set local.data_dir=DIRECTORY, or"):
        recipe_named(str(file), "trainer", gone, yes=False)
    recipe_named(str(file), "monitor", gone, yes=False)


def test_a_disk_without_room_is_refused_also_by_who_agrees_to_all(
    contact: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=300_000))
    for role in ROLES:
        with pytest.raises(RecipeError, match=r"300 kB free, and what this peer keeps there takes .*SWARM_DATA_DIR"):
            recipe_named(str(LINK), role, [], yes=True)
    assert list(tmp_path.iterdir()) == []
    demand = replace(demand_of(small(), OUTLINE, "trainer"), frozen=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=45 * 10**8))
    lines = dict(consent.sheet(small(), "trainer", demand, "1 GiB of 8 GiB", Path("/data"), small().local.limits))
    assert lines["disk"].endswith("only 4.5 GB are free, which is too little"), "unless its base is here already"


@pytest.mark.parametrize("role", ROLES)
def test_the_page_and_its_question_fit_a_terminal_of_24_lines_with_what_matters_first(role: Role) -> None:
    """A volunteer's usual paths and an invitation to a closed run included."""
    recipe = parse_recipe((RECIPES / "stdlib-lm.yaml").read_text(), directory=Path("/data"))
    for going in (UNKNOWN, RunEstimate(6.3, trainers=12, monitors=2, auxiliaries=3)):
        demand = demand_of(recipe, OUTLINE, role, going)
        memory, home = "613 MiB of the 23.5 GiB of this machine's memory", "/home/margarethe/.local/share/swarm/"
        lines = consent.sheet(recipe, role, demand, memory, Path(f"{home}stdlib-lm-34digzek"), recipe.local.limits)
        names = [name for name, _ in lines]
        assert names[0] == "role" and names.index("leaving") < names.index("data")
        assert names[2:5] == ["memory", "disk", "traffic"]
        secret = SimpleNamespace(secret=b"1", invitation=SimpleNamespace(until=2e9))
        lines.insert(1, ("access", consent.invitation_in_words(secret)))  # type: ignore[arg-type]
        shown = io.StringIO()
        consent.show(recipe, "k7q2m4xw5z", lines, Console(file=shown, width=80))
        above_and_below = 3  # that it asks the contact and looks at this computer; the question
        assert len(shown.getvalue().splitlines()) + above_and_below <= 24, shown.getvalue()


# What joining does with the answer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def contact(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A contact that counts how often it is asked, and no model that has to be built."""
    asked = SimpleNamespace(times=0, shown=0, recipe=small())

    def fetch(link: Link, directory: Path, bring: object) -> tuple[Recipe, RecipeOffered]:
        asked.times += 1
        text = offered(asked.recipe)
        return read_offered(text.encode(), link, directory), RecipeOffered(text, 3, 9.0)

    def show(*arguments: object) -> None:
        asked.shown += 1

    monkeypatch.setattr("swarmcli.cli.linking.fetch_recipe", fetch)
    monkeypatch.setattr("swarmcli.training.outline.outline_of", lambda recipe: OUTLINE)
    monkeypatch.setattr(consent, "show", show)
    return asked


def answered(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(text))
    monkeypatch.setattr(sys, "stderr", Terminal())


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "yes please\n"])
def test_anything_but_yes_joins_nothing_and_leaves_nothing(
    answer: str, contact: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered(monkeypatch, answer)
    with pytest.raises(typer.Exit) as end:
        recipe_named(str(LINK), "trainer", [], yes=False)
    assert end.value.exit_code == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_what_was_typed_before_the_question_is_no_answer_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal, os.fdopen(master, "wb", buffering=0) as keys:
        keys.write(b"y\n")
        assert select.select([terminal], [], [], 10)[0]
        monkeypatch.setattr(sys, "stdin", terminal)
        consent.forget_what_was_typed()
        assert not select.select([terminal], [], [], 0)[0]


def test_it_asks_once_for_each_role(contact: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, "y\n")
    named = recipe_named(str(LINK), "trainer", [], yes=False)
    assert (named.path, named.contacts) == (LinkedRun(LINK).recipe, LINK.addresses)
    assert contact.shown == contact.times == 1
    again = recipe_named(str(LINK), "trainer", [], yes=False)
    assert again == named
    assert contact.shown == contact.times == 1
    recipe_named(str(LINK), "auxiliary", [], yes=True)
    assert (contact.shown, contact.times) == (2, 1)


def test_without_a_terminal_the_missing_word_is_named_and_what_must_agree_cannot_be_set(
    contact: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="add --yes"):
        recipe_named(str(LINK), "trainer", [], yes=False)
    assert list(tmp_path.iterdir()) == [] and contact.shown == 0, "nobody waits for a page that none can answer"
    with pytest.raises(RecipeError, match=r"--set changes optimizer\.learning_rate"):
        recipe_named(str(LINK), "trainer", ["optimizer.learning_rate=1"], yes=True)
    recipe_named(str(LINK), "trainer", ["local.threads=1"], yes=True)


def test_validate_shows_the_same_and_asks_and_writes_nothing(contact: SimpleNamespace, tmp_path: Path) -> None:
    shown = typed(validate)(LINK)
    assert "run                   small" in shown.stdout and "the link's recipe is in order" in shown.stdout
    assert "checking what that takes" in shown.stderr
    told = typed(validate)(LINK, "--json")
    assert json.loads(told.stdout)["values"]["run_id"] == "small"
    assert (contact.shown, contact.times) == (1, 2) and list(tmp_path.iterdir()) == []


def test_a_path_of_this_computer_begins_where_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "recipe.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    words = [f"--set={each}" for each in ("output_dir=out", "local.data_dir=.", "local.identity_path=~/key", "seed=7")]
    values = json.loads(typed(validate)("far/recipe.yaml", "--quick", "--json", *words).stdout)["values"]
    assert (values["output_dir"], values["local"]["data_dir"]) == (str(tmp_path / "out"), str(tmp_path))
    assert values["local"]["identity_path"] == str(Path("~/key").expanduser()) and values["seed"] == 7


def test_a_path_is_taken_as_it_is_and_processes_of_a_site_do_not_ask_again(tmp_path: Path) -> None:
    (path := tmp_path / "recipe.yaml").write_text(SMALL)
    named = recipe_named(str(path), "trainer", ["seed=7"], yes=False)
    assert named == RecipeToJoin(path, load_recipe(path, ["seed=7"]))
    words = replace(named, contacts=["tcp://a:1"]).in_place_of(str(LINK), ["join", str(LINK), "--nproc", "2"])
    assert words == ["join", str(path), "--nproc", "2", "--peer", "tcp://a:1"]
    assert not any(map(is_link, words)) and linking.is_link is is_link
