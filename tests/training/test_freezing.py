"""Which parameters of a recipe's model are trained, and which weights the others have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.errors import RecipeError
from swarmcli.optim.state.frozen import frozen_of
from swarmcli.training import Compute, build_task, parameter_groups
from swarmcli.training.demand import demand_of
from swarmcli.training.freezing import check_frozen, frozen_bytes, frozen_in_words
from swarmcli.training.memory import memory_needs

from .small_tasks import outlined, small

HEAD = r"unfrozen_parameters=['transformer\.ln_f', 'transformer.h.[0-9]+.mlp']"
CPU = Compute(torch.device("cpu"))


def build(recipe: Any) -> Any:
    return build_task(recipe).build_model()


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_what_the_patterns_do_not_name_is_frozen(tmp_path: Path) -> None:
    model = build(small(tmp_path, HEAD))
    names = {name for name, _ in model.named_parameters()}
    assert trained(model) == {n for n in names if n.startswith(("transformer.ln_f", "transformer.h.0.mlp"))}
    assert sum(len(group["params"]) for group in parameter_groups(small(tmp_path), model)) == len(trained(model))
    assert trained(build(small(tmp_path))) == names


def test_a_tied_weight_is_trained_by_any_of_its_names(tmp_path: Path) -> None:
    tied = "base_model.tie_word_embeddings=true"
    assert trained(build(small(tmp_path, tied, "unfrozen_parameters=[lm_head]"))) == {"transformer.wte.weight"}


@pytest.mark.parametrize(
    "patterns, says",
    [
        ("[transformer.head]", r"unfrozen_parameters: 'transformer.head' begins no name .* lm_head.weight"),
        ("['*']", "no regular expression"),
        ("['(a*)*']", "may take too long"),
        ("['(.|.|a)(.|.)(.|.)(.|.)z']", "may take too long"),
        ("['.*.*.*.*!']", "begins no name"),  # and ends soon
        ("['" + "a" * 300 + "']", "may take too long"),
        (f"[{', '.join(['a'] * 65)}]", "64"),
    ],
)
def test_patterns_that_cannot_be_meant(tmp_path: Path, patterns: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        build(small(tmp_path, f"unfrozen_parameters={patterns}"))


def test_a_recipe_that_freezes_names_the_weights(tmp_path: Path) -> None:
    recipe = small(tmp_path, HEAD)
    digest = frozen_of([], build(recipe).named_parameters()).digest
    with pytest.raises(RecipeError, match=f"unfrozen_parameters=.*are not trained.*`frozen_weights: {digest}`"):
        check_frozen(recipe, build(recipe))
    named = small(tmp_path, HEAD, f"frozen_weights={digest}")
    assert "the run's" in frozen_in_words(named, build(named))
    other = small(tmp_path, HEAD, f"frozen_weights={digest}", "seed=5")
    assert "come from its peers" in frozen_in_words(other, build(other))
    plain = small(tmp_path)
    assert frozen_in_words(plain, build(plain)) == ""
    with pytest.raises(RecipeError, match="all parameters are trained; remove the key"):
        check_frozen(small(tmp_path, f"frozen_weights={digest}"), build(plain))


def test_the_config_of_a_saved_model_will_do_where_others_have_its_weights(tmp_path: Path) -> None:
    build(small(tmp_path)).save_pretrained(tmp_path / "saved")
    recipe = small(tmp_path, HEAD, "base_model=saved")
    digest = frozen_of([], build(recipe).named_parameters()).digest
    (tmp_path / "saved" / "model.safetensors").unlink()
    assert build(recipe).lacks_weights, "whoever begins a run needs them"
    model = build(small(tmp_path, HEAD, "base_model=saved", f"frozen_weights={digest}"))
    assert trained(model) == trained(build(small(tmp_path, HEAD)))


def test_memory_and_traffic_count_what_is_trained(tmp_path: Path) -> None:
    plain, recipe = small(tmp_path), small(tmp_path, HEAD)
    outline, model = outlined(recipe), build(recipe)
    learns = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    assert frozen_bytes(outline) == frozen_bytes(model) > 0
    needs = {need.what: need.nbytes for need in memory_needs(recipe, outline, "trainer", CPU)}
    assert needs["gradients"] == learns and needs["statistics of adamw"] == 2 * learns
    assert needs["a copy of the state, while somebody downloads it"] == 3 * learns
    demand = demand_of(recipe, outline, "trainer")
    assert (demand.round, demand.state, demand.frozen) == (learns, 3 * learns, frozen_bytes(model))
    assert demand_of(plain, build(plain), "trainer").frozen == 0
    assert demand_of(recipe, outline, "auxiliary").frozen == 0
    cuda = memory_needs(recipe, outline, "trainer", Compute(torch.device("cuda", 0)))
    assert ("a copy of frozen weights, while somebody downloads them", frozen_bytes(model)) in {
        (need.what, need.nbytes) for need in cuda
    }
