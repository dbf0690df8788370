from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from swarmcli.errors import RecipeError
from swarmcli.recipe.document import parse_document, parse_value, plain


def read(text: str) -> Any:
    return plain(parse_document(text, "file.yaml"), Any)


def problem(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_document(text, "file.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("1e-4", 1e-4),  # YAML 1.1 reads text
        ("6.02e+23", 6.02e23),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x10", 16),
        ("-7", -7),
        ("010", 10.0),  # YAML 1.1 reads eight
        ("no", "no"),  # YAML 1.1 reads false
        ("12:30", "12:30"),  # YAML 1.1 reads 750
        ("2024-01-01", "2024-01-01"),  # YAML 1.1 reads a date
        ("true", True),
        ("null", None),
        ('"true"', "true"),
        ("-.inf", -math.inf),
        ("1e", "1e"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_a_word_means_what_a_person_expects(word: str, meaning: object) -> None:
    found = read(f"key: {word}")["key"]
    assert found == meaning and type(found) is type(meaning)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_that_python_writes_is_read_as_that_float(number: float) -> None:
    assert read(f"key: {number!r}")["key"] == number


# What YAML 1.1 writes as text without quotes, and a person means as a number.
TEXTS = st.text(max_size=20).filter(lambda text: not re.fullmatch(r"[-+]?[\d_.]+[eE][-+]?\d+", text))


@given(st.recursive(st.integers() | TEXTS | st.booleans() | st.none(), lambda x: st.lists(x, max_size=3)))
@example("0E")
def test_what_yaml_writes_is_read_back(value: object) -> None:
    assert read(yaml.safe_dump({"key": value})) == {"key": value}


def test_a_key_given_twice_is_refused_with_both_lines() -> None:
    assert problem("a: 1\nb: 2\na: 3\n") == (
        "file.yaml:3: the key 'a' is given twice, first at file.yaml:1; remove one of them"
    )
    assert "given twice" in problem("s:\n  'a': 1\n  a: 3\n")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['true']", "!mine 1", "!!int '3'"])
def test_tags_are_refused_so_that_nothing_is_constructed(tag: str) -> None:
    message = problem(f"a: 1\nb: {tag}\n")
    assert message.startswith("file.yaml:2: the tag") and "without it" in message


def test_aliases_are_copies_that_do_not_fill_the_memory() -> None:
    assert read("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}
    assert "contains itself" in problem("a: &x [*x]")
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "more than 20000 values" in problem("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\n\tb: 2", "file.yaml:2: a tab stands where YAML wants spaces; indent with spaces"),
        ("a: 1\nb: [1, 2", "file.yaml:2: this is no valid YAML"),
        ("", "file.yaml:1: the recipe is empty"),
        ("- a\n- b\n", "file.yaml:1: a recipe is a list of `key: value` lines"),
        ("a: 1\n---\nb: 2\n", "no valid YAML"),
        ("? [a]\n: 1\n", "a key must be a word"),
        ("a: " + "[" * 300 + "]" * 300, "nested too deeply"),
        ("a: 1\nb: " + "[" * 40 + "]" * 40, "file.yaml:2: nested too deeply"),
    ],
)
def test_broken_files_are_refused_with_the_line(text: str, words: str) -> None:
    assert words in problem(text)


def test_values_of_the_command_line_may_be_words_lists_and_mappings_and_need_no_quotes() -> None:
    meant = {"3": 3, "[1, x]": [1, "x"], "{a: 1e-2}": {"a": 0.01}, "": None}
    words = {text: text for text in ("*.md", "!x", "a: b", "# x", "&a", "- x", "@x", "`x`")}
    for text, meaning in (meant | words).items():
        assert plain(parse_value(text, "o"), Any) == meaning
    with pytest.raises(RecipeError, match="--set a=\\[: the value cannot be read"):
        parse_value("[", "--set a=[")
    with pytest.raises(RecipeError, match="the tag"):
        parse_value("[!!python/name:os.system]", "--set a")
