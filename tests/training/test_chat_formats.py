"""Conversations as people have them: calls of tools, thoughts, parts, flags of other trainers, dates."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from swarmcli.recipe import HuggingFaceDataset
from swarmcli.training.chat import BadRow, ChatReader
from swarmcli.training.sources import HuggingFaceSource

from .small_tasks import CHATML, MARKED, chat_tokenizer, write_rows

# As Qwen 3: it writes tools, calls and thoughts, the latter behind the last question alone.
WHOLE = """\
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- set last = messages | map(attribute='role') | list -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and 'user' not in last[loop.index:] -%}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
ASKS = {"role": "user", "content": "Rain in Oslo?"}
ANSWERS = {"role": "assistant", "content": "Two millimetres."}
TOOL = {"role": "tool", "content": "2 mm", "tool_call_id": "c1"}
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]


def calls(arguments: Any, content: Any = "", **others: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **others}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


def reader(tokenizer: Any, template: str = WHOLE, **keys: Any) -> ChatReader:
    dataset = HuggingFaceDataset(
        source="huggingface", path="json", data_files=("x",), type="chat_template", **keys
    )  # fmt: skip
    return ChatReader(tokenizer, dataset, template)


def learned(made: ChatReader, messages: Any, **row: Any) -> list[str]:
    """What is learned of a conversation, stretch by stretch."""
    tokens, known = made({"messages": messages, **row})
    found, before = [], False
    for token, counts in zip(tokens, known, strict=True):
        if counts:
            found = found if before else [*found, []]
            found[-1].append(token)
        before = bool(counts)
    return [made._tokenizer.decode(each) for each in found]


def written(tokenizer: Any, messages: Any, number: int, **options: Any) -> str:
    """What a model is to write in place of a message: by transformers alone."""
    write = tokenizer.apply_chat_template
    prompt = write(messages[:number], chat_template=WHOLE, tokenize=False, add_generation_prompt=True, **options)
    whole = write(messages[: number + 1], chat_template=WHOLE, tokenize=False, **options)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("\n")


@pytest.mark.parametrize(("content", "arguments"), [("", {"city": "Oslo"}), (None, '{"city": "Oslo"}'), ("So. ", "")])
def test_a_call_is_what_is_learned_and_its_arguments_are_values(
    tokenizer: Any, content: str | None, arguments: Any
) -> None:
    values = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    plain = [ASKS, calls(values, content or ""), TOOL, ANSWERS]
    found = learned(reader(tokenizer), [ASKS, calls(arguments, content), TOOL, ANSWERS])
    assert found == [written(tokenizer, plain, 1), written(tokenizer, plain, 3)]
    said = calls(arguments, content)
    as_text = {**said, "tool_calls": json.dumps(said["tool_calls"])}
    assert learned(reader(tokenizer), [ASKS, as_text, TOOL, ANSWERS]) == found
    assert f"<call>rain {json.dumps(values)}</call><|im_end|>" in found[0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (calls({}), "message 1 has tool_calls, which the chat template does not write"),
        (calls({}, "I look."), "message 1 has tool_calls, which the chat template does not write"),
        ({"role": "assistant", "content": None, "function_call": {"name": "a"}}, "message 1 has function_call, which"),
        ({"role": "assistant", "content": ""}, "message 1 of assistant says nothing that could be learned"),
        ({"role": "assistant", "content": " \n"}, "message 1 of assistant says nothing that could be learned"),
        ({"role": "assistant", "content": "", "thinking": "a"}, "message 1 of assistant says nothing that could be"),
        ({"role": "assistant", "content": None}, "message 1 has no text in 'content', but None"),
        ({"role": "assistant", "content": [{"type": "image_url"}]}, r"no text in 'content', but \[{'type': 'image_url"),
        (calls("{city"), "a call or a tool is no JSON"),
        (calls("[" * 100_000), "a call or a tool is no JSON"),
        ({**ANSWERS, "weight": 0.5}, "message 1 has weight 0.5, and a turn is learned or not: 0 or 1"),
        ({**ANSWERS, "train": "no"}, "message 1 has train 'no', and a turn is learned or not: 0 or 1"),
        ({**ANSWERS, "train_detail": [{"begin_offset": 0}]}, "message 1 has train_detail "),
    ],
)
def test_what_would_be_learned_as_something_else_is_left_out_by_name(tokenizer: Any, said: Any, words: str) -> None:
    for template in (CHATML, MARKED):
        with pytest.raises(BadRow, match=words):
            learned(reader(tokenizer, template), [ASKS, said])


def test_tools_are_read_where_the_template_writes_them(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template([ASKS, ANSWERS], chat_template=WHOLE, tools=TOOLS, tokenize=False)
    for tools in (TOOLS, json.dumps(TOOLS)):
        tokens, _ = reader(tokenizer)({"messages": [ASKS, ANSWERS], "tools": tools})
        assert tokenizer.decode(tokens) == text and '"name": "rain"' in text
    with pytest.raises(BadRow, match="it has tools, which the chat template does not write; take"):
        reader(tokenizer, CHATML)({"messages": [ASKS, ANSWERS], "tools": TOOLS})
    assert learned(reader(tokenizer, CHATML), [ASKS, ANSWERS], tools=[]) == ["Two millimetres.<|im_end|>"]


def test_a_call_is_found_where_it_follows_the_question_itself(tokenizer: Any) -> None:
    """As in Mistral's template: a space stands before what is said, and none before a call."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}[CALLS]"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ ' ' + m.content }}{% endif %}{{ eos_token }}"
        "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
    )
    found = learned(reader(tokenizer, template), [ASKS, calls({}), TOOL, ANSWERS])
    assert found == ['[CALLS]{"name": "rain", "arguments": {}}</s>', "Two millimetres.</s>"]


def test_nulls_of_columns_that_other_rows_fill_are_no_arguments(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"messages": [ASKS, calls(each)]} for each in ({"city": "Oslo"}, {"days": 3})]
    source = HuggingFaceSource("json", data_files=[str(write_rows(tmp_path / "a.jsonl", *rows))], text_column=None)
    made = reader(tokenizer)
    found = [learned(made, document.content["messages"]) for document in source.documents("seed")]  # type: ignore[call-overload,index]
    expected = [[written(tokenizer, row["messages"], 1)] for row in rows]
    assert sorted(found) == sorted(expected)


def test_an_answer_begins_where_a_prompt_to_generate_it_ends(tokenizer: Any) -> None:
    thinks = {**ANSWERS, "reasoning_content": "Oslo is wet."}
    talk = [ASKS, thinks, ASKS, thinks]
    made = reader(tokenizer)
    assert learned(made, talk) == ["Two millimetres.<|im_end|>", written(tokenizer, talk, 3)]
    assert "<think>\nOslo is wet.\n</think>" in written(tokenizer, talk, 3)
    assert learned(made, [ASKS, ANSWERS]) == [written(tokenizer, [ASKS, ANSWERS], 1)]


@pytest.mark.parametrize("template", [CHATML, MARKED, WHOLE])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (({}, {"weight": 0}, {}, {"weight": 1}), [3]),
        (({}, {"train": False}, {}, {"train": True}), [3]),
        (({"train": True}, {"train": False}, {}, {}), [0, 3]),
        (({"training": True}, {}, {}, {"training": False}), [0, 1]),
        (({"weight": 1}, {"weight": 0}, {"weight": 0}, {"weight": 0}), []),
        (({"train": None}, {"train": None, "weight": None}, {}, {}), [1, 3]),
    ],
)
def test_flags_say_which_turns_are_learned(
    tokenizer: Any, template: str, flags: tuple[dict[str, Any], ...], expected: list[int]
) -> None:
    said = ("one?", "one.", "two?", "two.")
    roles = ("user", "assistant") * 2
    talk = [{"role": r, "content": c, **f} for r, c, f in zip(roles, said, flags, strict=True)]
    found = learned(reader(tokenizer, template), talk)
    assert [text.split("</think>\n\n")[-1] for text in found] == [f"{said[n]}<|im_end|>" for n in expected]


def test_a_flag_may_have_another_name(tokenizer: Any) -> None:
    made = reader(tokenizer, CHATML, message_property_mappings={"train": "keep"})
    assert learned(made, [ASKS, {**ANSWERS, "keep": False}, ASKS, ANSWERS]) == ["Two millimetres.<|im_end|>"]


def test_parts_of_text_are_one_text(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Two ", "image_url": None}, {"type": "text", "text": "millimetres."}]
    talk = [ASKS, {"role": "assistant", "content": parts}]
    assert learned(reader(tokenizer, CHATML), talk) == ["Two millimetres.<|im_end|>"]


def test_a_system_beside_the_messages_comes_first(tokenizer: Any) -> None:
    for messages in ([ASKS, ANSWERS], [{"role": "system", "content": "Be brief."}, ASKS, ANSWERS]):
        tokens, _ = reader(tokenizer, CHATML)({"messages": messages, "system": "Be brief."})
        assert tokenizer.decode(tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")


def test_no_template_writes_the_day_on_which_a_peer_reads(tokenizer: Any, tmp_path: Path) -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') + ', ' + strftime_now(\"%A\") }}\n{% endif %}"
    made = reader(tokenizer, dated + CHATML)
    tokens, _ = made({"messages": [ASKS, ANSWERS]})
    assert tokenizer.decode(tokens).startswith("26 Jul 2024, Friday\n<|im_start|>")
    made.save(tmp_path)
    saved = type(tokenizer).from_pretrained(tmp_path).apply_chat_template([ASKS], tokenize=False)
    assert saved.startswith(f"{datetime.now():%d %b %Y, %A}\n"), "whoever uses the model has today"
    with pytest.raises(ValueError, match="writes today's date, which differs between peers; write a date there"):
        reader(tokenizer, "{% set form = '%d' %}{{ strftime_now(form) }}" + CHATML)
