from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.errors import RecipeError
from swarmcli.recipe import load_recipe, parse_recipe

from .recipes import SMALL


def test_a_file_is_read_and_its_paths_begin_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    recipe = load_recipe(file, ["seed=4"])
    assert recipe.seed == 4 and recipe.output_dir == tmp_path / "runs"
    assert recipe.origin("run_id") == f"{file}:1"
    monkeypatch.chdir(tmp_path)
    assert load_recipe("small.yaml").origin("run_id") == "small.yaml:1", "as it was named"


words = st.text(alphabet="abno1e-.:[]{}#&*!'\"\n\t |>%@~,", max_size=30) | st.text(max_size=10)


@given(
    st.sampled_from(SMALL.splitlines()), words, st.sampled_from(["{line}{word}", "{word}{line}", "{word}", "  {word}"])
)
def test_whatever_is_typed_ends_in_a_recipe_or_in_an_error_that_names_the_place(
    line: str, word: str, form: str
) -> None:
    text = SMALL.replace(line, form.format(line=line, word=word))
    try:
        parse_recipe(text, name="r.yaml")
    except RecipeError as error:
        assert all(part.startswith("r.yaml:") for part in str(error).splitlines() if ": " in part)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("https://example.org/join", "web page; open it in a browser"),
        ("arm://abc@192.0.2.1:31330/small", "a part of a link; copy it again"),
        ("", "nothing is named"),
    ],
)
def test_what_is_no_path_at_all_is_told_as_what_it_was_meant(typed: str, said: str) -> None:
    for named in (typed, Path(typed)):
        with pytest.raises(RecipeError, match=said):
            load_recipe(named)


def test_files_that_cannot_be_recipes_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gone\.yaml: cannot be read \(No such file or directory\); give a link"):
        load_recipe(tmp_path / "gone.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "latin").write_bytes(b"run_id: \xff\xfe")
    with pytest.raises(RecipeError, match="no UTF-8 text"):
        load_recipe(tmp_path / "latin")
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(RecipeError, match="larger than 1 MiB"):
        load_recipe(tmp_path / "large")


def test_the_package_is_light(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, swarmcli.recipe; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
