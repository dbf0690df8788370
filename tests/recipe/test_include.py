"""A recipe that takes the keys of another file."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.errors import RecipeError
from swarmcli.recipe import load_recipe, parse_recipe
from swarmcli.recipe.offered import offered

from .recipes import SMALL, small


def write(directory: Path, name: str, text: str) -> Path:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_keys_of_the_file_hold_where_none_are_here_and_sections_are_laid_over(tmp_path: Path) -> None:
    write(tmp_path, "shared/base.yaml", SMALL + "optimizer: {name: sgd, momentum: 0.9, learning_rate: 0.5}\n")
    file = write(tmp_path, "run.yaml", "include: shared/base.yaml\nrun_id: other\noptimizer: {learning_rate: 0.1}\n")
    recipe = load_recipe(file, ["seed=5"])
    assert (recipe.run_id, recipe.seed) == ("other", 5)
    assert (recipe.optimizer.name, recipe.optimizer.momentum, recipe.optimizer.learning_rate) == ("sgd", 0.9, 0.1)
    assert recipe.datasets == small().datasets and recipe.directory == tmp_path
    assert parse_recipe(*recipe.source[:2], name=recipe.source[2], directory=recipe.source[3]) == recipe


def test_an_error_names_the_file_and_line_in_which_it_stands(tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", SMALL + "seed: many\n")
    file = write(tmp_path, "run.yaml", "include: base.yaml\nmax_epochs: none\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    assert f"{base}:{base.read_text().count(chr(10))}: seed should be" in str(raised.value)
    assert f"{file}:2: max_epochs should be" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include: gone.yaml\n", r"run\.yaml:1: include: .*gone\.yaml cannot be read \(No such file"),
        ("include: run.yaml\n", r"run\.yaml includes itself, so this has no end"),
        ("include: [a, b]\n", r"include should be the path of a recipe file"),
        ("include: list.yaml\n", r"list\.yaml:1: a recipe is a list of `key: value` lines"),
    ],
)
def test_what_cannot_be_included_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "list.yaml", "- 1\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, "run.yaml", text))


def test_a_link_brings_all_keys_and_reads_no_file_of_the_volunteer(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", SMALL)
    recipe = load_recipe(write(tmp_path, "run.yaml", "include: base.yaml\nseed: 3\n"))
    text = offered(recipe)
    assert '"include"' not in text and '"seed": 3' in text
    with pytest.raises(RecipeError, match="unknown key include"):
        parse_recipe(text.replace('"seed": 3', '"include": "base.yaml"'), directory=tmp_path, may_include=False)
