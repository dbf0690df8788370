"""The task causal_lm on rows: conversations, completions, packs of them."""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from swarmcli.errors import DataError, RecipeError
from swarmcli.recipe import Recipe, parse_recipe
from swarmcli.training import build_task
from swarmcli.training.chat import IGNORED
from swarmcli.training.look import look_at_rows

from .small_tasks import CHATML, MARKED, TALK, chat_tokenizer, write_rows

MODELS = {
    "gpt2": "{model_type: gpt2, n_layer: 2, n_head: 2, n_embd: 16, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0, "
    "initializer_range: 0.3}",
    "llama": "{model_type: llama, num_hidden_layers: 2, num_attention_heads: 2, hidden_size: 16, "
    "intermediate_size: 32, initializer_range: 0.3}",
}
CHAT = """\
run_id: chat
base_model: {model}
tokenizer: saved
datasets:
  - {{path: chats.jsonl, type: chat_template, streaming: false}}
sequence_len: 64
target_batch_size: 8
micro_batch_size: 2
local: {{device: cpu, shuffle_buffer_size: 4}}
"""


def talk(answer: str, turns: int = 1) -> dict[str, Any]:
    return {"messages": [TALK[0], {"role": "assistant", "content": answer}] * turns}


ROWS = [talk("a b c d e f"[: 2 * n + 1], 1 + n % 2) for n in range(5)]


def chat(directory: Path, *overrides: str, model: str = "gpt2", rows: Any = ROWS, template: str = MARKED) -> Recipe:
    chat_tokenizer(template).save_pretrained(directory / "saved")
    write_rows(directory / "chats.jsonl", *rows)
    return parse_recipe(CHAT.format(model=MODELS[model]), overrides, name="chat.yaml", directory=directory)


def drawn(task: Any, count: int, position: Any = None) -> list[dict[str, Any]]:
    return [
        {name: tensor.tolist() for name, tensor in batch.items()}
        for batch in itertools.islice(task.batches(0, position), count)
    ]


def mean_of(alone: list[tuple[float, float]]) -> float:
    return sum(loss * weight for loss, weight in alone) / sum(weight for _, weight in alone)


def rows_of(pack: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The rows of a batch of one pack."""
    begins = [*(pack["position_ids"][0] == 0).nonzero()[:, 0].tolist(), pack["input_ids"].shape[1]]
    return [
        {name: tensor[:, a:b] for name, tensor in pack.items() if name != "position_ids"}
        for a, b in itertools.pairwise(begins)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_packed_rows_are_learned_as_if_each_was_alone(tmp_path: Path, model: str) -> None:
    recipe = chat(tmp_path, "sample_packing=true", "micro_batch_size=1", "sequence_len=128", model=model)
    task = build_task(recipe)
    built: Any = task.build_model()
    for pack in itertools.islice(task.batches(0), 4):
        rows = rows_of(dict(pack))
        learned = [int((row["labels"] != IGNORED).sum()) for row in rows]
        alone = [task.loss(built, row).item() for row in rows]
        expected = sum(loss * n for loss, n in zip(alone, learned, strict=True)) / sum(learned)
        assert len(rows) > 1 and all(learned)
        assert task.loss(built, pack).item() == pytest.approx(expected, rel=1e-5)


def test_packs_of_unlike_length_are_learned_side_by_side(tmp_path: Path) -> None:
    task = build_task(chat(tmp_path, "sample_packing=true"))
    built: Any = task.build_model()
    batch = next(b for b in task.batches(0) if (b["position_ids"][:, -2:] == 0).all(1).any())
    packs = [{name: tensor[n : n + 1] for name, tensor in batch.items()} for n in range(2)]
    alone = [(task.loss(built, pack).item(), task.weight(pack)) for pack in packs]
    assert task.loss(built, batch).item() == pytest.approx(mean_of(alone), rel=1e-5)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_stream_of_rows_goes_on_where_it_was(tmp_path: Path, packing: str) -> None:
    rows = [talk("a b c"[:n], n) for n in (1, 3, 2, 5)]
    recipe = chat(tmp_path, f"sample_packing={packing}", "sequence_len=40", rows=rows)
    task = build_task(recipe)
    whole = drawn(task, 13)
    for taken in (0, 1, 2, 7):
        stream = task.batches(0)
        list(itertools.islice(stream, taken))
        position = json.loads(json.dumps(stream.position()))
        assert drawn(build_task(recipe), 6, position) == whole[taken : taken + 6]


def test_an_architecture_that_mixes_packed_rows_is_refused_by_its_name(tmp_path: Path) -> None:
    fields = "{model_type: mamba, hidden_size: 16, state_size: 4, num_hidden_layers: 1, initializer_range: 0.3}"
    recipe = chat(tmp_path, "sample_packing=true", f"base_model={fields}")
    with pytest.raises(RecipeError, match="sample_packing: a mamba model does not keep the rows of a sample apart"):
        build_task(recipe).build_model()


def test_texts_and_completions_are_rows_of_their_own_whose_every_token_is_learned(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("where are you " * 10)
    recipe = chat(tmp_path, "datasets.1={path: texts}", "sequence_len=32", "micro_batch_size=8")
    learned = [
        int((labels != IGNORED).sum())
        for b in itertools.islice(build_task(recipe).batches(0), 4)
        for labels in b["labels"]
    ]
    assert max(learned) == 31  # all but the first token of a piece of the text
    write_rows(tmp_path / "texts.jsonl", {"said": "in the swarm"}, {"said": "who"})
    item = "datasets.0={path: texts.jsonl, type: completion, field: said, streaming: false}"
    batch = next(build_task(chat(tmp_path, item, "tokenizer=bytes")).batches(0))
    by_length = sorted(row[row != IGNORED].tolist() for row in batch["labels"])
    assert by_length == [[*b"ho", 256], [*b"n the swarm", 256]]


def test_the_first_row_without_a_sample_is_told_and_the_tenth(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rows = [talk("a"), talk("b"), {"messages": [TALK[0]]}, {"messages": []}]
    list(itertools.islice(build_task(chat(tmp_path, rows=rows)).batches(0), 14))
    told = [record.getMessage() for record in caplog.records if record.name.startswith("swarmcli")]
    assert re.match(r"datasets.0: of \d rows, 1 left out \(chats.jsonl, row [34]: ", told[0])
    assert re.match(r"datasets.0: of \d+ rows, 10 left out \(", told[1]) and len(told) == 2
    assert told[0].endswith("; the training goes on without")
    assert "row 3: nothing to learn, no turn of assistant" in told[1] and "row 4: messages is [], and" in told[1]


@pytest.mark.parametrize(
    ("rows", "overrides", "words"),
    [
        (
            [{"messages": [TALK[0]]}],
            (),
            "no row of the data teaches anything; datasets.0: of 1 rows, 1 left out (chats.jsonl, row 1: nothing",
        ),
        (
            ROWS,
            ("sequence_len=4",),
            "5 left out (chats.jsonl, row 5: nothing to learn, no turn of assistant in what is",
        ),
        ([{"messages": "a"}], (), "1 left out (chats.jsonl, row 1: messages is 'a', and not a list of messages)"),
        ([{"talk": []}], (), "row 1: there is no column 'messages'; set field_messages to one of talk"),
        (ROWS, ("datasets.0.roles_to_train=[tool]",), "no turn of tool in what is not cut off"),
    ],
)
def test_data_that_teach_nothing_are_refused(tmp_path: Path, rows: Any, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(DataError) as caught:
        next(build_task(chat(tmp_path, *overrides, rows=rows)).batches(0))
    assert words in str(caught.value)


@pytest.mark.parametrize("tokenizer", ["bytes", "saved"])
def test_the_saved_tokenizer_has_the_template_that_was_learned(tmp_path: Path, tokenizer: str) -> None:
    task = build_task(
        chat(tmp_path, f"tokenizer={tokenizer}", "chat_template=chatml", "sequence_len=128", template=CHATML + " ")
    )
    task.save_preprocessing(tmp_path)
    saved = AutoTokenizer.from_pretrained(str(tmp_path))
    ids = saved.apply_chat_template(ROWS[0]["messages"], return_dict=True)["input_ids"]
    assert ids in [row[: len(ids)] for batch in drawn(task, 6) for row in batch["input_ids"]]
    assert (tmp_path / "tokenizer.json").exists() and saved.chat_template != CHATML + " "


@pytest.mark.parametrize("packing", ["true", "false"])
def test_conversations_are_evaluated_too_down_to_the_last_row(tmp_path: Path, packing: str) -> None:
    write_rows(tmp_path / "others.jsonl", *(talk(letter) for letter in "abcde"))
    named = "evaluation={every_epochs: 1, dataset: {path: others.jsonl, type: chat_template, streaming: false}}"
    task: Any = build_task(chat(tmp_path, named, f"sample_packing={packing}"))
    labels = [row[row != IGNORED].tolist() for batch in task.evaluation_batches() for row in batch["labels"]]
    assert sorted("".join(map(task.tokenizer.decode, labels))) == list("abcde")
    write_rows(tmp_path / "others.jsonl", {"messages": [TALK[0]]})
    with pytest.raises(DataError, match="shorter than one sequence of 64 tokens, or teaches nothing"):
        build_task(chat(tmp_path, named)).evaluation_batches()


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_rows_are_looked_at_before_anybody_trains_on_them(tmp_path: Path, streaming: str) -> None:
    recipe = chat(
        tmp_path,
        f"datasets.0.streaming={streaming}",
        "sequence_len=16",
        rows=[{"messages": [TALK[0]]}, {"messages": TALK}, talk("b")],
    )
    (look,) = look_at_rows(build_task(recipe))
    assert (look.name, look.rows) == ("datasets.0", 3)
    assert "1 left out (chats.jsonl, row 1: nothing to learn" in look.counts and look.counts.endswith(
        "1 cut at 16 tokens"
    )
    whole = "".join(text for text, _ in look.sample)
    assert whole.startswith("<|im_start|>user\nwhere are you<|im_end|>\n")
    assert [use for _, use in look.sample][:2] == ["read", "learned"]
    (look,) = look_at_rows(build_task(chat(tmp_path, "datasets=[{source: stdlib}]")))
    assert (look.rows, look.counts, look.sample) == (100, "", ())
