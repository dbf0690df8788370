"""How a causal language model reads the rows of a dataset one by one, and what it learns of each.

    row ── TextReader or ChatReader ──▶ tokens, each learned or not ── RowEncoder ──▶ examples of sequence_len at most

A template with `{% generation %}` itself marks what an assistant says. With other templates, and for other roles,
ChatReader finds a turn by rendering the conversation again with a probe word in the turn's place: text that stays the
same around that word does not belong to the turn. So a template may trim a turn, or treat turns by their place; each
turn is still found exactly or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from datetime import date
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmcli.recipe import HuggingFaceDataset
from swarmcli.recipe.dataset import CHATML
from swarmcli.training.samples import CountedRows, Example
from swarmcli.training.sources import BadRow, Content
from swarmcli.training.tokenizer import Tokenizer, Tokens
from swarmcli.words import first_words

IGNORED = -100  # torch's cross entropy leaves out labels of this value

_TEMPLATES = {
    CHATML: """\
{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- message.content + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
}
_ROLES = {"human": "user", "gpt": "assistant"} | {r: r for r in ("system", "developer", "user", "assistant", "tool")}
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CALLS = ("tool_calls", "function_call")
_JSON = (*_CALLS, "arguments", "parameters", "tools")  # datasets hold these as values, or as JSON in a text
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

Span: TypeAlias = tuple[int, int]  # characters of a rendered conversation: the first, and the one after the last
Message: TypeAlias = Mapping[str, Any]


class Read(NamedTuple):
    """A row as a model reads it, before it is cut."""

    tokens: Tokens  # (n,)
    learned: npt.NDArray[np.bool_]  # (n,)


class RowEncoder(CountedRows):
    """Makes examples {"input_ids", "attention_mask", "labels": (n,)} of rows, 2 ≤ n ≤ sequence_len."""

    def __init__(self, name: str, reader: TextReader | ChatReader, sequence_len: int) -> None:
        """`name`: the recipe's item, as messages name it."""
        super().__init__(name, self._examples, reader.advice)
        self.reader = reader
        self._sequence_len = sequence_len

    def _examples(self, row: Content) -> Iterator[Example]:
        tokens, learned = self.reader(row)
        size = self._sequence_len
        parts = range(0, len(tokens), size) if self.reader.goes_on else (0,)
        self.cut += len(tokens) > size and not self.reader.goes_on
        for begin in parts:
            # No token comes before the first one, so there is nothing to predict it from.
            known = np.concatenate([[False], learned[begin + 1 : begin + size]])
            if known.any():
                ids = tokens[begin : begin + size]
                labels = np.where(known, ids, IGNORED)
                yield {"input_ids": ids.copy(), "attention_mask": np.ones_like(ids), "labels": labels}


class TextReader:
    """Reads texts; a model learns all of them."""

    goes_on = True  # a row that is longer than a sample goes on in the next one; False: it is cut off
    advice = " (no text)"  # said of rows in which there is nothing to learn
    template = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, row: Content) -> Read:
        tokens = np.concatenate([self._tokenizer.before, self._tokenizer.encode(str(row)), self._tokenizer.behind])
        return Read(tokens.astype(np.int32), np.ones(len(tokens), bool))


class ChatReader:
    """Reads conversations by a chat template."""

    goes_on = False

    def __init__(
        self, tokenizer: Any, dataset: HuggingFaceDataset, template: str | None, called: str = "the data"
    ) -> None:
        """`tokenizer`: transformers' own. `called`: the dataset, in messages. Raises ValueError, with the fix, if the
        template or the tokenizer cannot show what is to be learned."""
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer cannot say which characters its tokens are; save it as tokenizer.json")
        try:
            self.template = tokenizer.get_chat_template(_TEMPLATES.get(template or "", template))
        except ValueError:
            raise ValueError(
                "the tokenizer has no chat template; write `chat_template: chatml`, or a Jinja template there"
            ) from None
        # Peers train on different days, so a template gets the date that Llama 3's takes where there is no clock.
        self._rendered = _TODAY.sub(lambda found: repr(date(2024, 7, 26).strftime(found[2])), self.template)
        if "strftime_now(" in self._rendered:
            raise ValueError("the chat template writes today's date, which differs between peers; write a date there")
        self._tokenizer, self._tools = tokenizer, None  # `_tools`: of the row that is being read
        self._dataset = dataset
        self._called = called
        self._names = {"role": "role", "content": "content", **dataset.message_property_mappings}
        self._roles = _ROLES | {role: role for role in dataset.roles_to_train}
        usual = dataset.roles_to_train == ("assistant",) and dataset.train_on_eos == "turn"
        self._marked = usual and _MARKS.search(self.template) is not None
        self.advice = f", no turn of {' or '.join(dataset.roles_to_train)} in what is not cut off"
        self._try_out()

    def __call__(self, row: Content) -> Read:
        """Raises BadRow, and DataError if the data cannot have such rows at all."""
        reader = copy(self)
        messages, reader._tools = self._messages(row)
        text, spans = reader._learned(messages)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begin, end = np.asarray(encoded["offset_mapping"], int).reshape(-1, 2).T
        learned = np.zeros(len(begin), bool)
        for first, behind in spans:
            learned |= (begin < behind) & (np.maximum(end, begin + 1) > first)
        return Read(np.asarray(encoded["input_ids"], np.int32), learned)

    def save(self, directory: Path) -> None:
        """Writes the tokenizer with this template, as transformers does. Raises OSError."""
        tokenizer = deepcopy(self._tokenizer)
        tokenizer.chat_template = self.template
        tokenizer.save_pretrained(str(directory))

    def _try_out(self) -> None:
        """Renders a small conversation before there are data, and refuses a template that does not show what is to be
        learned."""
        said = {"user": "What is it?", "assistant": "A swarm."}
        probe = [{"role": role, "content": said[role]} for role in ("user", "assistant") * 2]
        if not set(said) & set(self._dataset.roles_to_train):
            return  # what these roles say depends on the data
        try:
            _, spans = self._learned(probe)
        except BadRow as error:
            raise ValueError(
                f"the chat template does not tell what is to be learned: {error}; mark what the assistant says, and "
                "its end, by {% generation %} and {% endgeneration %}, or write `chat_template: chatml`"
            ) from None
        if not any(first < behind for first, behind in spans):
            raise ValueError(
                "the chat template marks nothing of a conversation by {% generation %}; mark what the assistant says, "
                "or remove the marks"
            )
        if self._marked:
            self._marked = False
            with suppress(BadRow):  # a template that marks turns need not let them be found in another way
                _, rendered = self._learned(probe)
                if not any(first < rendered[-1][1] <= behind for first, behind in spans):
                    raise ValueError(
                        "the chat template marks by {% generation %} what the assistant says, and not the end of its "
                        "turn, so a model would never learn to stop; move the end between the marks, or remove them"
                    )
            self._marked = True

    def _messages(self, row: Content) -> tuple[list[dict[str, Any]], Any]:
        """The messages of a row, and the tools that stand beside them."""
        field = self._dataset.field_messages
        if not isinstance(row, Mapping) or field not in row:
            columns = ", ".join(sorted(map(str, row))) if isinstance(row, Mapping) else "none"
            raise BadRow(f"there is no column {field!r}; set field_messages to one of {columns}")
        value = row[field]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise BadRow(f"{field} is {value!r:.60}, and not a list of messages")
        messages = [self._message(each, number) for number, each in enumerate(value)]
        if isinstance(system := row.get("system"), str) and system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        if (tools := _plain({"tools": row.get("tools")}).get("tools") or None) and "tools" not in self.template:
            raise BadRow("it has tools, which the chat template does not write; take one that does")
        return messages, tools

    def _message(self, value: Any, number: int) -> dict[str, Any]:
        where = f"message {number}"
        if not isinstance(value, Mapping):
            raise BadRow(f"{where} is {value!r:.60}, and not a mapping")
        value = _plain(value)
        found = value | {name: value[column] for name, column in self._names.items() if column in value}
        content = found.get("content", "" if any(map(found.get, _CALLS)) else None)
        if isinstance(content, list) and all(isinstance(p, dict) and p.keys() == {"type", "text"} for p in content):
            content = "".join(str(p["text"]) for p in content)
        found["content"] = content
        for name in ("role", "content"):
            if not isinstance(found.get(name), str):
                column, there = self._names[name], ", ".join(sorted(map(str, value)))
                fix = "" if column in value else f"; it has {there[:100]}: set message_property_mappings"
                raise BadRow(f"{where} has no text in {column!r}, but {found.get(name)!r:.60}{fix}")
        if found["role"] not in self._roles:
            raise BadRow(f"{where} is of {found['role']!r:.60}, and not of {', '.join(self._roles)}")
        found["role"] = self._roles[found["role"]]
        if lost := [name for name in _CALLS if found.get(name) and name not in self.template]:
            raise BadRow(f"{where} has {lost[0]}, which the chat template does not write; take one that does")
        if odd := [n for n in ("weight", "train", "training", "train_detail") if found.get(n, 1) not in (0, 1)]:
            raise BadRow(f"{where} has {odd[0]} {found[odd[0]]!r:.40}, and a turn is learned or not: 0 or 1")
        if self._learns(found) and not (found["content"].strip() or any(map(found.get, _CALLS))):
            raise BadRow(f"{where} of {found['role']} says nothing that could be learned")
        return found

    def _learns(self, message: Message) -> bool:
        """Whether a turn is learned: axolotl's flag outweighs its role, OpenAI's weight of 0 takes it out."""
        learned = message.get("train", message.get("training", message["role"] in self._dataset.roles_to_train))
        return bool(learned and message.get("weight", 1))

    def _learned(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """A conversation as text, and which characters of it are learned."""
        if self._marked and all(self._learns(each) == (each["role"] == "assistant") for each in messages):
            return self._render(messages, return_assistant_tokens_mask=True)
        text, _ = self._render(messages)
        spans, when = [], self._dataset.train_on_eos
        for number, message in enumerate(messages):
            last, learned = number == len(messages) - 1, self._learns(message)
            if not learned and not (when == "all" or (when == "last" and last)):
                continue
            begin, end = self._turn(messages, number, text)
            mark = self._end_of_turn(messages, number, text, end, must=learned) if when != "last" or last else ""
            behind = text.index(mark, end) + len(mark)
            # The text between the content and the mark leads to it, so it is learned as well.
            spans.append((begin, behind) if learned else (behind - len(mark), behind))
        return text, spans

    def _turn(self, messages: Sequence[Message], number: int, text: str) -> Span:
        """Returns where the content of a message stands in `text`, the whole conversation. What an assistant says
        begins where a prompt to generate it ends."""
        role = messages[number]["role"]
        before, after = self._around(messages, number, text)
        asked = "add_generation_prompt" in self.template or messages[number].get("tool_calls")
        if role == "assistant" and number and asked:
            with suppress(BadRow):  # a template may refuse a conversation that ends early
                prompt, _ = self._render(messages[:number], add_generation_prompt=True)
                before = prompt if before.startswith(prompt) else before
        if not (text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)):
            raise BadRow(f"what the template writes around a message of {role} changes with what the message says")
        return len(before), len(text) - len(after)

    def _end_of_turn(self, messages: Sequence[Message], number: int, text: str, end: int, *, must: bool) -> str:
        """Returns the mark at the end of a turn: the first word after its content if no turn followed; "" if there is
        none. `end`: where the content ends in `text`, the whole conversation."""
        role, rest = messages[number]["role"], text[end:]
        try:
            _, after = self._around(messages[: number + 1], number, text)
        except BadRow:
            if must:
                raise
            return ""
        mark = next(iter(after.split(maxsplit=1)), "")
        if mark and rest.lstrip().startswith(mark):
            return mark
        if must and mark:
            raise BadRow(f"the template ends a message of {role} by {mark!r:.40} only where it is the last one")
        if must:
            raise BadRow(f"the template ends a message of {role} with nothing that a model could learn to stop at")
        return ""

    def _around(self, messages: Sequence[Message], number: int, text: str) -> tuple[str, str]:
        """The text that a template writes before and after the content of a message."""
        role = messages[number]["role"]
        said = text + "".join(str(message["content"]) for message in messages)
        probe = next(word for word in (f"swarm{n}" for n in count()) if word not in said)
        # The probe has no other properties: what a template makes of them, a thought for example, belongs to the turn
        # too.
        other, _ = self._render([*messages[:number], {"role": role, "content": probe}, *messages[number + 1 :]])
        before, *after = other.split(probe)
        if len(after) != 1:
            raise BadRow(f"the template writes what a message of {role} says {len(after)} times")
        return before, after[0]

    def _render(self, messages: Sequence[Message], **options: bool) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [list(messages)], self._tools, None, self._rendered, **options, **self._tokenizer.special_tokens_map
            )
        except Exception as error:  # whatever a template meets in a conversation that it was not written for
            raise BadRow(f"the chat template refuses it: {first_words(error)}") from error
        return texts[0], spans[0] if spans else []


def _plain(value: Any) -> Any:
    """Returns a value of a row without nulls (a table has them where only other rows hold more), and with calls and
    tools as values where they are JSON in a text. Raises BadRow."""
    try:
        return json.loads(json.dumps(value, default=str), object_hook=_without_nulls)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"a call or a tool is no JSON ({error})") from error


def _without_nulls(found: Mapping[str, Any]) -> dict[str, Any]:
    texts = {k for k, v in found.items() if k in _JSON and isinstance(v, str) and v.lstrip()[:1] in "{["}
    read = partial(json.loads, object_hook=_without_nulls)
    return {k: read(v or "{}") if k in texts else v for k, v in found.items() if v is not None}
