"""What travels of a recipe, and what is refused of one that travelled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from swarmcli.errors import RecipeError
from swarmcli.network.identity import Identity
from swarmcli.recipe import Link, Recipe, digest_of, fingerprint_of, offered, parse_recipe, read_offered
from swarmcli.recipe.offered import files_of, offered_contents, offered_files
from tests.hub_stand_in import Hub, hub
from tests.recipe.recipes import SMALL, small

__all__ = ["hub"]

PEER = Identity.from_seed(1).peer_id
RECIPES = Path(__file__).parents[2] / "recipes"


def link_to(recipe: Recipe, run_id: str = "small") -> Link:
    return Link(PEER, ("203.0.113.7:31330",), run_id, digest_of(recipe))


def hostile(tmp_path: Path, **changes: Any) -> str:
    """What is said of a recipe that was changed in a stranger's way, to whoever has a link to that very recipe."""
    values = json.loads(offered(small())) | changes
    data = json.dumps(values).encode()
    try:
        link = link_to(parse_recipe(data.decode()))
    except RecipeError:
        link = link_to(small())
    with pytest.raises(RecipeError) as caught:
        read_offered(data, link, tmp_path)
    assert set(filter(lambda each: not each.isprintable(), str(caught.value))) <= {"\n"}
    return str(caught.value)


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_recipes_arrive_with_the_fingerprint_that_they_left_with(file: Path, tmp_path: Path) -> None:
    text = file.read_text().replace("tokenizer: model ", "tokenizer: bytes")
    text = re.sub(r"base_model: (model|base)\b", "base_model: {model_type: gpt2}", text)
    recipe = parse_recipe(text, name=file.name, directory=RECIPES)
    arrived = read_offered(offered(recipe).encode(), link_to(recipe, recipe.run_id), tmp_path)
    assert fingerprint_of(arrived) == fingerprint_of(recipe)
    assert arrived.micro_batch_size == recipe.micro_batch_size
    assert offered(arrived) == offered(recipe)


def test_nothing_of_the_owners_machine_travels(tmp_path: Path) -> None:
    own = ["local.name=secret", "local.identity_path=/secret/key", "output_dir=/secret/out", "checkpoint.keep=7"]
    shared = ["optimizer.learning_rate=3e-5", "averaging.matchmaking_time=4", "network.initial_peers=[tcp://secret:1]"]
    text = offered(small(*own, *shared, "datasets=[{source: files, path: secretless, glob: '**/*.md'}]"))
    assert "secret/" not in text and '"secret"' not in text and "keep" not in text
    arrived = json.loads(text)
    assert arrived["optimizer"] == {"learning_rate": 3e-05}  # what --set changed travels like what the file says
    assert arrived["averaging"] == {"matchmaking_time": 4.0}
    assert arrived.keys().isdisjoint({"local", "output_dir", "checkpoint", "network"})


def test_a_saved_model_travels_by_its_name_alone(tmp_path: Path) -> None:
    for home, name in ((tmp_path / "owner" / "pythia", "a"), (tmp_path / "volunteer" / "models" / "pythia", "b")):
        home.mkdir(parents=True)
        (home / "config.json").write_text('{"model_type": "gpt2"}')
        (home / "tokenizer.json").write_text("{}")
        (home / name).write_text("lies beside it")
    text = SMALL.replace("base_model:\n  model_type: gpt2\n  n_layer: 1\n  n_head: 2\n  n_embd: 16\n", "")
    home = tmp_path / "owner" / "pythia"
    recipe = parse_recipe(f"{text}base_model: {home}\ntokenizer: {home}\n")
    assert "owner" not in offered(recipe)
    arrived = read_offered(offered(recipe).encode(), link_to(recipe), tmp_path / "volunteer")
    assert fingerprint_of(arrived) == fingerprint_of(recipe)
    with pytest.raises(RecipeError, match=r"base_model: it is a saved model .* put it at .*nowhere/models/pythia"):
        read_offered(offered(recipe).encode(), link_to(recipe), tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["/home/me/texts", "~/texts", "../texts", "C:\\texts", "a/../../b"])
def test_a_recipe_with_paths_of_one_machine_has_no_link_and_says_why(path: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot be joined by a link.*datasets\.0\.path leads out of .*data_dir"):
        offered(small(f"datasets=[{{source: files, path: '{path}'}}]"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"datasets": [{"source": "files", "path": "/etc"}]}, "datasets.0.path leads out"),
        ({"evaluation": {"dataset": {"source": "files", "path": "/etc"}}}, "evaluation.dataset.path leads out"),
        ({"datasets": [{"source": "files", "path": "t", "glob": "../**/id_*"}]}, "datasets.0.glob leads out"),
        ({"datasets": [{"source": "files", "path": "~root/.ssh"}]}, "datasets.0.path leads out"),
        ({"base_model": "/home/me/model"}, "base_model is a path of another computer"),
        ({"tokenizer": "models/none"}, "tokenizer: it is a saved model or tokenizer, which that peer does not"),
        ({"include": "base.yaml"}, "unknown key include"),
        ({"output_dir": "/home/me"}, "output_dir is for each volunteer to choose"),
        ({"local": {"trust_remote_code": True}}, "local.trust_remote_code is for each volunteer"),
        ({"network": {"initial_peers": ["tcp://203.0.113.9:1"]}}, "network.initial_peers is for each volunteer"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep is for each volunteer"),
        ({"averaging": {"proceed_alone": True}}, "averaging.proceed_alone is for each volunteer"),
        ({"averaging": {"averaging_timeout": 1e9}}, "averaging.averaging_timeout is more than a day"),
        ({"base_model": {"model_type": "gpt2", "n_layer": 10**9}}, "base_model.n_layer is more than 1,024"),
        ({"adapter": "lora", "lora_target_modules": "(a|a)*b"}, "lora_target_modules should be"),
        ({"base_model": {"model_type": "gpt2", "x": [0] * 2000}}, "base_model.x has more than 1024 items"),
        ({"base_model": {"model_type": "gemma3", "text_config": {"attn_implementation": "a/b"}}}, "chooses code"),
        ({"base_model": {"model_type": "x", "use_pretrained_backbone": True}}, "chooses code"),
        ({"base_model": {"model_type": "gpt2", "activation_function": "a/b"}}, "names a path or an address"),
        ({"run_id": "another"}, "run_id is 'another', and the link is one of 'small'"),
        ({"sequence_len": "\x1b]0;owned\x07" * 9}, "sequence_len should be a whole number"),
        ({"\x1b[2J": 1}, "unknown key"),
    ],
)  # fmt: skip
def test_hostile_recipes_are_refused_by_key_with_what_to_do(changes: Any, words: str, tmp_path: Path) -> None:
    said = hostile(tmp_path, **changes)
    assert words in said and ";" in said, said


@pytest.mark.parametrize(
    "dataset",
    [
        {"path": "home"},  # a directory here, or a format that unpickles
        {"path": "pandas", "data_files": ["x.pkl"]},
        {"path": "json"},
        {"path": "json", "data_files": ["/etc/passwd"]},
        {"path": "json", "data_files": ["../x"]},
        {"path": "json", "data_files": ["file:///etc/passwd"]},
        {"path": "json", "data_files": ["zip://*.json::https://example.org/a.zip"]},
        {"path": "json", "data_files": ["https://example.org/a::file:///etc/passwd"]},
        {"path": "json", "data_files": ["https://192.168.1.1/x"]},
        {"path": "json", "data_files": ["https://router.local/x"]},
        {"path": "json", "data_files": ["https://localhost/x"]},
        {"path": "json", "data_files": ["https://0x7f.1/x"]},
        {"path": "json", "data_files": ["https://me:pw@example.org/x"]},
        {"path": "json", "data_files": ["https://example.org:22/x"]},
        {"path": "json", "data_files": ["http://example.org/x"]},
        {"path": "json", "data_files": ["hf://datasets/a/../../x"]},
        {"path": "a/b", "data_files": ["/etc/passwd"]},
    ],
)
def test_datasets_read_nothing_but_the_hub_public_hosts_and_the_data_directory(dataset: Any, tmp_path: Path) -> None:
    assert "datasets.0." in hostile(tmp_path, datasets=[{"source": "huggingface", **dataset}])


@pytest.mark.parametrize(
    "dataset",
    [
        {"path": "Salesforce/wikitext", "name": "wikitext-103-raw-v1"},
        {"path": "a/b", "data_files": ["data/*.parquet"]},
        {"path": "json", "data_files": ["https://example.org/a.jsonl", "hf://datasets/a/b/c.jsonl", "more/*.jsonl"]},
    ],
)
def test_datasets_that_volunteers_can_read_travel(dataset: Any) -> None:
    recipe = parse_recipe(
        json.dumps(json.loads(offered(small())) | {"datasets": [{"source": "huggingface", **dataset}]})
    )
    assert json.loads(offered(recipe))["datasets"] == [{"source": "huggingface", **dataset}]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ""),
        (b"\xff\xfe", ""),
        (b"a: &a [1, 2]\nb: [*a, *a]", ""),
        (b'{"run_id": "small", "a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", ""),
        (b'{"a": ' + b"9" * 10_000 + b"}", ""),
        (b'{"a": "' + b"x" * (1 << 18) + b'"}', ""),
        (b'{"run_id": "small", "run_id": "small"}', "that has each key once"),
        # What would take YAML long is refused before it reads it.
        (b'{"a": {"x": [' + b"{}," * 9000 + b'1], "x": 1}}', "that has each key once"),
        (b'{"a": [' + b"0," * 9000 + b"0]}", "more than 5000 values, so"),
        (b'{"a": ["\\ud800"]}', "no JSON object in UTF-8"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply, so"),
    ],
    ids=lambda each: repr(each[:24]),
)
def test_what_is_no_recipe_is_refused_soon(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words or None):
        read_offered(data, link_to(small()), tmp_path)


def test_another_recipe_than_the_links_is_refused(tmp_path: Path) -> None:
    for other in (small("seed=2"), small("base_model.n_inner=9"), small("base_model.x={}")):
        with pytest.raises(RecipeError, match="not the one that the link speaks of"):
            read_offered(offered(other).encode(), link_to(small()), tmp_path)
    advised = small("micro_batch_size=4", "averaging.averaging_timeout=9")
    assert read_offered(offered(advised).encode(), link_to(small()), tmp_path).micro_batch_size == 4
    keeping = small("checkpoint.every_epochs=20", "checkpoint.keep=9")  # who joins by the link writes them in its turn
    checkpoint = read_offered(offered(keeping).encode(), link_to(small()), tmp_path).checkpoint
    assert (checkpoint.every_epochs, checkpoint.keep) == (20, 3), "how many stay is for each volunteer"


# Saved models


def owners(directory: Path, base: str = "owner/pythia", **config: Any) -> Recipe:
    """A recipe whose author has a model with its tokenizer in a directory."""
    home = directory / "owner" / "pythia"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps({"model_type": "gpt2", "_name_or_path": "acme/tiny", **config}))
    (home / "tokenizer.json").write_text("{}")
    (home / "merges.txt").write_text("a b")
    (home / "model.safetensors").write_text("large")
    text = SMALL.replace(SMALL[SMALL.index("base_model") : SMALL.index("datasets")], f"base_model: {base}\n")
    return parse_recipe(text, directory=directory)


def test_config_and_hashes_travel_beside_the_recipe_and_prove_each_file(tmp_path: Path) -> None:
    recipe, home = owners(tmp_path), tmp_path / "volunteer"
    kept: dict[str, Any] = {}
    arrived = read_offered(offered(recipe).encode(), link_to(recipe), home, offered_contents(recipe), kept.update)
    assert set(kept["tokenizer"]) == {"merges.txt", "tokenizer.json"} == set(offered_files(recipe))
    got = {name: path.read_bytes() for name, path in offered_files(recipe).items()}
    files = files_of(arrived, kept, got)
    assert {path.relative_to(home / "models" / "pythia").name for path in files} == {"config.json", *got}
    assert not home.exists(), "nothing is written by reading"
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert fingerprint_of(arrived) == fingerprint_of(recipe)
    kept.clear()
    assert read_offered(offered(recipe).encode(), link_to(recipe), home, offered_contents(recipe), kept.update)
    assert not kept, "all of it is here"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["base_model"].update(n_layer=9), "not the one that the link speaks of"),
        (lambda c: c["tokenizer"].update({"tokenizer.json": "0" * 64}), "not the one that the link speaks of"),
        (lambda c: c["tokenizer"].update({"../vocab.json": "0" * 64}), "no file '../vocab.json'"),
        (lambda c: c["tokenizer"].update({"modeling.py": "0" * 64}), "no file 'modeling.py'"),
        (lambda c: c["tokenizer"].update({".tokenizer.json": "0" * 64}), "no file"),
        (lambda c: c["tokenizer"].update({"vocab.json": "x"}), "no file 'vocab.json'"),
        (lambda c: c["tokenizer"].update({f"vocab{i}.json": "0" * 64 for i in range(40)}), "more than 32 files"),
        (lambda c: c.update(tokenizer="bytes"), "has not the form"),
        (lambda c: c.update(base_model="models/pythia"), "has not the form"),
        (lambda c: c["base_model"].update(x="y" * (1 << 18)), "too large for a link"),
        (lambda c: c["base_model"].update(_attn_implementation="evil/kernel"), "chooses code and not a shape"),
        (lambda c: c["base_model"].update(auto_map={"AutoConfig": "evil--own.Own"}), "names a path or an address"),
        (lambda c: c["base_model"].update(n_layer=10**9), "base_model.n_layer is more than 1,024"),
    ],
)
def test_a_hostile_word_on_a_saved_model_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    recipe = owners(tmp_path)
    contents = json.loads(offered_contents(recipe))
    change(contents)
    kept: list[Any] = []
    with pytest.raises(RecipeError) as caught:
        text = json.dumps(contents)
        read_offered(offered(recipe).encode(), link_to(recipe), tmp_path / "volunteer", text, kept.append)
    assert words in str(caught.value) and not kept
    for torn in ("{", "[]", '{"tokenizer": "bytes", "tokenizer": {}}', "[" * 10_000):
        with pytest.raises(RecipeError):
            read_offered(offered(recipe).encode(), link_to(recipe), tmp_path / "volunteer", torn, kept.append)


def test_configs_as_transformers_saves_them_may_travel(tmp_path: Path) -> None:
    usual: dict[str, Any] = {
        "_attn_implementation_autoset": True,
        "auto_map": {"AutoConfig": "configuration_own.Own"},
        "conv_kernel": 4,
        "id2label": {"0": "n/a"},
        "task_specific_params": {"translation": {"prefix": "translate English to German: "}},
        "use_pretrained_backbone": False,
    }
    assert offered(owners(tmp_path, **usual))


def test_what_is_too_large_for_a_link_or_may_choose_code_has_no_link(tmp_path: Path) -> None:
    recipe = owners(tmp_path)
    with (tmp_path / "owner" / "pythia" / "vocab.json").open("wb") as stream:
        stream.truncate(65 << 20)
    with pytest.raises(RecipeError, match=r"cannot be joined by a link: .* 65 MiB; links bring 64 MiB"):
        offered(recipe)
    quantised = owners(tmp_path / "other", quantization_config={"quant_method": "x"})
    with pytest.raises(RecipeError, match=r"cannot be joined by a link: .*quantization_config chooses code"):
        offered(quantised)


def test_two_directories_of_one_name_stay_two(tmp_path: Path) -> None:
    recipe = owners(tmp_path)
    (tmp_path / "words" / "pythia").mkdir(parents=True)
    (tmp_path / "words" / "pythia" / "vocab.txt").write_text("a")
    recipe = parse_recipe(recipe.source[0] + "tokenizer: words/pythia\n", directory=tmp_path)
    arrived = json.loads(offered(recipe))
    assert (arrived["base_model"], arrived["tokenizer"]) == ("models/pythia", "models/pythia-tokenizer")


def test_a_model_of_the_hub_is_asked_for_by_nobody_who_has_not_agreed(hub: Hub, tmp_path: Path) -> None:
    home = owners(tmp_path).locate("owner/pythia")
    recipe = owners(tmp_path, f"acme/tiny\nrevision: {hub.push('acme/tiny', home)}")
    text, contents, link = offered(recipe).encode(), offered_contents(recipe), link_to(recipe)
    hub.asked.clear()
    kept: dict[str, Any] = {}
    arrived = read_offered(text, link, tmp_path / "volunteer", contents, kept.update)
    assert (arrived.base_model, arrived.revision) == ("acme/tiny", recipe.revision) and kept
    with pytest.raises(RecipeError, match="which that peer does not hand out"):
        read_offered(text, link, tmp_path / "volunteer")
    assert hub.asked == []
    branch = text.replace(str(recipe.revision).encode(), b"main")
    with pytest.raises(RecipeError, match="revision is no commit, so it may change"):
        read_offered(branch, link, tmp_path / "volunteer", contents)


@pytest.mark.parametrize("name", ["data", "Models", "recipe.yaml", "agreed.json", "invitation", "nul", "con.x", "run."])
def test_a_run_of_a_name_that_this_computer_uses_itself_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="a name that this computer uses itself; the run needs another one"):
        offered(small(f"run_id={name}"))


@pytest.mark.parametrize("pattern", ["(?x)([^!]+) +!", "(?x)([^!]+)\n+!", "a(?=b)"])
def test_a_pattern_whose_flags_could_hide_what_is_repeated_is_refused(pattern: str) -> None:
    with pytest.raises(RecipeError, match=r"has \(\? in it"):
        small(f"unfrozen_parameters=[{json.dumps(pattern)}]")
