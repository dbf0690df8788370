"""How rows of datasets are read: which keys fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmcli.errors import RecipeError
from swarmcli.recipe import offered

from .recipes import SMALL, refused, small

CHAT = "datasets.0={path: chats.jsonl, type: chat_template}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["datasets.0.type=chat_template"], "--set datasets.0.type=chat_template: a text file has no conversations"),
        ([CHAT, "datasets.0.field=a"], "field has no meaning for type: chat_template; remove it, or name the column"),
        (["datasets.0={path: a.jsonl, roles_to_train: [user]}"], "roles_to_train has no meaning for type: text;"),
        (["datasets.0={path: a.jsonl, type: completion, field_messages: talk}"], "field_messages has no meaning for"),
        ([CHAT, "datasets.0.field_message=a"], "unknown key datasets.0.field_message; did you mean field_messages?"),
        (["chat_template=chatml"], "no dataset has conversations; set type: chat_template in one of datasets"),
        ([CHAT, "chat_template=chatml", "datasets.0.chat_template=chatml"], "each dataset with type: chat_template"),
        ([CHAT, "chat_template=llama3"], "chat_template: 'llama3' is no template; write chatml, a Jinja template, or"),
    ],
)
def test_keys_that_do_not_fit_a_type_are_refused(overrides: list[str], words: str) -> None:
    assert words in refused(SMALL, *overrides)


def test_flash_attention_takes_packs_one_by_one() -> None:
    packed = "sample_packing=true", "local.attn_implementation=flash_attention_2"
    assert "keeps the rows of packed samples apart only where a batch is one sample" in refused(SMALL, *packed)
    assert small(*packed, "local.micro_batch_size=1").micro_batch == 1
    assert small(*packed[:1], "local.attn_implementation=sdpa").micro_batch > 1


def test_conversations_may_be_what_is_evaluated_alone() -> None:
    named = "evaluation={every_epochs: 1, dataset: {path: chats.jsonl, type: chat_template}}"
    assert small(named, "chat_template=chatml").chat_template == "chatml"


@pytest.mark.parametrize(("override", "key"), [("sample_packing=true", "sample_packing"), (CHAT, "datasets.0.type")])
def test_a_task_that_reads_no_rows_so_refuses_them(override: str, key: str) -> None:
    said = refused(SMALL, override, "task=masked_lm")
    assert f"masked_lm reads no rows so; remove {key}, or take task: causal_lm" in said


def test_a_link_brings_no_program(tmp_path: Path) -> None:
    for key in ("chat_template", "datasets.0.chat_template"):
        with pytest.raises(RecipeError, match=f"{key} is a program that would run at whoever joins; write chatml"):
            offered(small(CHAT, f"{key}='{{{{ messages }}}}'"))
    assert json.loads(offered(small(CHAT, "chat_template=chatml")))["chat_template"] == "chatml"
