from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe, differing_keys, digest_of, fingerprint_of
from swarmcli.recipe.document import at, is_section, sections
from swarmcli.recipe.fingerprint import PROTOCOL
from swarmcli.recipe.problems import all_keys
from swarmcli.recipe.section import is_shared

from .recipes import SMALL, small


def differs(*overrides: str) -> list[str]:
    return differing_keys(fingerprint_of(small()), fingerprint_of(small(*overrides)))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate"),
        ("base_model.n_layer=2", "base_model.n_layer"),
        ("datasets.0.weight=2", "datasets.0.weight"),
        ("seed=9", "seed"),
        ("run_id=other", "run_id"),
        ("target_batch_size=33", "target_batch_size"),
        ("compression.gradients=float16", "compression.gradients"),
        ("averaging.aggregator={name: mean, gate: 10}", "averaging.aggregator.gate, averaging.aggregator.name"),
        ("gradient_averaging.method=powersgd", "gradient_averaging.method"),
        ("delay.grad_averaging=yes", "delay.grad_averaging"),
        ("outer={optimizer: sgd, inner_batch_size: 8}", "outer.inner_batch_size, outer.optimizer"),
        ("sequence_len=8", "sequence_len"),
    ],
)
def test_what_must_agree_is_named_when_it_differs(override: str, key: str) -> None:
    assert differs(override) == key.split(", ")


@pytest.mark.parametrize(
    "override",
    [
        "micro_batch_size=1",
        "network.initial_peers=[tcp://h:1]",
        "averaging.matchmaking_time=3",
        "checkpoint.every_epochs=4",
        "local={device: cpu, port: 7, name: me, trust_remote_code: true, offload_optimizer: true}",
        "optimizer.learning_rate=0.001",  # the default, written out
    ],
)
def test_what_a_volunteer_may_choose_is_not_compared(override: str) -> None:
    assert differs(override) == []


def test_hashes_are_short_and_the_same_everywhere_and_the_protocol_is_part_of_them() -> None:
    fingerprint = fingerprint_of(small())
    assert "protocol" in fingerprint and all(len(value) == 16 for value in fingerprint.values())
    assert not [key for key in fingerprint if key.startswith(("local.", "network.", "checkpoint", "output_dir"))]
    # Peers of unlike machines and versions compare these: a change here is a change of the protocol.
    assert fingerprint["base_model.n_layer"] == "6b86b273ff34fce1"
    assert fingerprint["protocol"] == hashlib.sha256(str(PROTOCOL).encode()).hexdigest()[:16]
    assert differs("datasets.1={source: files, path: x}") == ["datasets.1.path", "datasets.1.source"]
    assert differing_keys(
        *(fingerprint_of(small(f"datasets.1={{source: {source}, path: x}}")) for source in ("files", "huggingface"))
    ) == ["datasets.1.source"]


def test_a_key_that_has_its_default_is_in_no_fingerprint_and_in_no_link() -> None:
    """So a version that adds one trains with peers that do not know it."""
    bare = {"protocol", "run_id", "sequence_len", "target_batch_size", "tokenizer", "datasets.0.source"}
    assert {key for key in fingerprint_of(small()) if not key.startswith("base_model.")} == bare
    for written in ("averaging={}", "optimizer={betas: [0.9, 0.999]}", "evaluation.dataset=null"):
        assert differs(written) == [] and digest_of(small(written)) == digest_of(small())
    assert digest_of(small("adapter=lora", "lora_alpha=16")) == digest_of(small("adapter=lora"))
    assert digest_of(small("seed=1")) != digest_of(small())


def test_what_torch_takes_where_nothing_is_written_counts_as_written() -> None:
    """The default of the schema is that of most optimizers, and not of each."""
    usual, same, other = (
        fingerprint_of(small(f"optimizer={{name: adagrad{eps}}}")) for eps in ("", ", eps: 1e-10", ", eps: 1e-8")
    )
    assert usual == same and differing_keys(usual, other) == ["optimizer.eps"]


def defaults_of(section: type[BaseModel]) -> dict[str, Any]:
    """The defaults of all keys that must agree, by the section that has them."""
    found: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        inner = [*sections(info.annotation), *sections(at(info.annotation, [0]))]
        for below in inner:
            found |= defaults_of(below)
        if is_shared(info) and not is_section(info.annotation):
            default = "required" if info.is_required() else json.loads(json.dumps(info.default))
            found[f"{section.__name__}.{name}"] = default
    return found


def test_a_default_that_was_released_stays() -> None:
    """Peers do not compare what is left out, so a version with another default would compute something else under the
    same fingerprint, in silence. Add new keys to the file. What must change takes another key, or another PROTOCOL."""
    assert defaults_of(Recipe) == json.loads((Path(__file__).parent / "defaults.json").read_text())


def test_every_field_says_whether_it_must_agree_and_keys_on_one_side_only_differ() -> None:
    assert differing_keys({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ["a", "b", "c"]
    for key, info in all_keys(Recipe).items():
        assert isinstance(info.json_schema_extra, dict) and "agree" in info.json_schema_extra, key
        assert info.description, key


def test_a_directory_counts_by_the_config_of_its_model_and_the_files_of_its_tokenizer(tmp_path: Path) -> None:
    configs = {"here": '{"model_type": "gpt2",  "n_layer": 1}', "there": '{"n_layer": 1, "model_type": "gpt2"}'}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "tokenizer.json").write_text("{}")
        (tmp_path / name / "README.md").write_text(name)
    text = SMALL.replace(SMALL[SMALL.index("base_model") : SMALL.index("datasets")], "base_model: here\n")

    def differ() -> list[str]:
        both = (["tokenizer=here"], ["base_model=there", "tokenizer=there"])
        return differing_keys(*(fingerprint_of(small(*each, text=text, directory=tmp_path)) for each in both))

    assert differ() == []
    (tmp_path / "there" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    assert differ() == ["base_model"]
    (tmp_path / "there" / "tokenizer.json").write_text("{ }")
    assert differ() == ["base_model", "tokenizer"]


def test_directories_that_are_not_there_are_named_with_the_place_in_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for override, words in (
        ("base_model=gone", "--set base_model=gone: base_model: 'gone' is no directory with a saved model"),
        ("tokenizer=gone", "--set tokenizer=gone: tokenizer: 'gone' is no directory"),
        ("base_model=broken", "no valid JSON"),
    ):
        with pytest.raises(RecipeError, match=words):
            fingerprint_of(small("tokenizer=bytes", override, directory=tmp_path))


KEPT = json.loads((Path(__file__).parents[1] / "kept" / "recipes.json").read_text())


@pytest.mark.parametrize(("overrides", "digest"), KEPT)
def test_recipes_of_former_builds_are_read_and_keep_their_fingerprint(overrides: list[str], digest: str) -> None:
    """One with each section. Made by `digest_of(small(*overrides))` of the build c5552e47."""
    assert digest_of(small(*overrides)) == digest
