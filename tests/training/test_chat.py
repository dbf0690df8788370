from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swarmcli.recipe import HuggingFaceDataset
from swarmcli.training import ByteTokenizer
from swarmcli.training.chat import IGNORED, ChatReader, RowEncoder, TextReader

from .small_tasks import CHATML, ENDLESS, LLAMA, MARKED, MARKS_NOTHING, TALK, THINKS_BEFORE, THINKS_LAST, chat_tokenizer


def item(**keys: Any) -> HuggingFaceDataset:
    return HuggingFaceDataset(source="huggingface", path="json", data_files=("x",), type="chat_template", **keys)


def reader(template: str | None, *, words: bool = False, **keys: Any) -> ChatReader:
    return ChatReader(chat_tokenizer(template, words=words), item(**keys), None)


def learned(made: ChatReader, messages: Any) -> list[str]:
    """What is learned of a conversation, stretch by stretch."""
    tokens, known = made({made._dataset.field_messages: messages})
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(int)))
    return [made._tokenizer.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


BOTH = ["in the swarm<|im_end|>", "  all the others \n<|im_end|>"]


@pytest.mark.parametrize("template", [MARKED, CHATML, THINKS_LAST, THINKS_BEFORE])
def test_the_model_learns_what_the_assistant_says_and_where_it_ends(template: str) -> None:
    assert learned(reader(template), TALK) == BOTH


def test_a_template_that_trims_and_alternates_is_followed() -> None:
    made = reader(LLAMA)
    assert [text.strip() for text in learned(made, TALK)] == ["in the swarm </s>", "all the others </s>"]


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_a_tokenizer_without_white_space_loses_no_turn(template: str) -> None:
    """The library's own mask ends at the first turn that begins with a character that is in no token."""
    talk = [TALK[0], {"role": "assistant", "content": "\n in the swarm"}, *TALK[2:]]
    assert learned(reader(template, words=True), talk) == ["in the swarm <|im_end|>", "all the others <|im_end|>"]


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_marks_and_rendering_agree_token_by_token(template: str) -> None:
    tokens, known = reader(template)({"messages": TALK})
    expected = chat_tokenizer().apply_chat_template(
        TALK, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokens.tolist() == expected["input_ids"]
    assert known.astype(int).tolist() == expected["assistant_masks"]


USERS = ["where are you<|im_end|>", "who else<|im_end|>"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"roles_to_train": ("user",)}, USERS),
        ({"roles_to_train": ("user", "assistant")}, [USERS[0], BOTH[0], USERS[1], BOTH[1]]),
        ({"train_on_eos": "last"}, ["in the swarm", BOTH[1]]),
        ({"train_on_eos": "all"}, ["<|im_end|>", BOTH[0], "<|im_end|>", BOTH[1]]),
        ({"train_on_eos": "last", "roles_to_train": ("user",)}, ["where are you", "who else", "<|im_end|>"]),
    ],
)
@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_roles_and_ends_are_learned_as_the_recipe_says(template: str, keys: Any, expected: list[str]) -> None:
    assert learned(reader(template, **keys), TALK) == expected


def test_bytes_have_a_template_by_its_name() -> None:
    for keys, said in (({}, BOTH), ({"roles_to_train": ("user",)}, USERS)):
        assert learned(ChatReader(ByteTokenizer().of_transformers(), item(**keys), "chatml"), TALK) == said


def test_the_named_template_writes_what_the_usual_one_does() -> None:
    made = ChatReader(chat_tokenizer(), item(), "chatml")
    write = made._tokenizer.apply_chat_template
    usual = write(TALK, chat_template=CHATML, tokenize=False)
    for prompt in (False, True):
        text = write(TALK, chat_template=made.template, tokenize=False, add_generation_prompt=prompt)
        assert text == usual + "<|im_start|>assistant\n" * prompt


def test_marks_are_taken_where_rendering_would_find_nothing() -> None:
    loud = MARKED.replace("m.content }}<|im_end|>{% end", "m.content | upper }}<|im_end|>{% end")
    assert learned(reader(loud), TALK)[0] == "IN THE SWARM<|im_end|>"


def test_thoughts_are_learned_with_what_is_said() -> None:
    thinks = CHATML.replace("\n{{", "\n{% if m.thought %}<think>{{ m.thought }}</think>{% endif %}{{")
    made = reader(thinks, message_property_mappings={"thought": "why"})
    talk = [TALK[0], {"role": "assistant", "content": "here", "why": "they ask"}, TALK[2], TALK[1]]
    assert learned(made, talk) == ["<think>they ask</think>here<|im_end|>", "in the swarm<|im_end|>"]


def test_columns_roles_and_properties_may_have_other_names_and_a_template_says_what_is_looked_for() -> None:
    made = reader(CHATML, field_messages="talk", message_property_mappings={"role": "from", "content": "value"})
    assert learned(made, [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]) == ["b<|im_end|>"]
    talk = [TALK[0], {"role": "assistant", "content": "swarm0 swarm1"}]
    assert learned(reader("swarm2 swarm0\n" + CHATML), talk) == ["swarm0 swarm1<|im_end|>"]
    made = reader(MARKED, roles_to_train=("system",))  # the library knows the mask of no other roles
    assert learned(made, [{"role": "system", "content": "be kind"}, *TALK]) == ["be kind<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the tokenizer has no chat template; write `chat_template: chatml`"),
        (ENDLESS, "ends a message of assistant with nothing that a model could learn to stop at"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}</s>{% endfor %}",
            "and not the end of its turn, so a model would never learn to stop; move the end between the marks",
        ),
        (MARKS_NOTHING, r"marks nothing of a conversation by \{% generation %\}"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "writes what a message of assistant says 0 times"),
        (CHATML * 2, "writes what a message of assistant says 2 times"),
        (
            "{% for m in messages %}{{ m.content | length }} {{ m.content }}</s>{% endfor %}",
            "around a message of assistant changes with what the message says",
        ),
        ("{{ raise_exception('no') }}", "the chat template refuses it: no"),
        ("{% for %}", "the chat template refuses it"),
        (
            "{% for m in messages %}{{ m.content }}{{ eos_token if loop.last }} {% endfor %}",
            "ends a message of assistant by '</s>' only where it is the last one",
        ),
    ],
)
def test_a_template_that_shows_nothing_is_refused(template: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reader(template)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is None, and not a list of messages"),
        ([], r"messages is \[\], and not a list of messages"),
        ("hello", "messages is 'hello', and not a list"),
        (["hello"], "message 0 is 'hello', and not a mapping"),
        ([TALK[0], {"role": "bot", "content": "a"}], "message 1 is of 'bot', and not of human, gpt, system,"),
        ([{"role": "user", "content": ["a"]}], r"message 0 has no text in 'content', but \['a'\]"),
        ([{"from": "human", "value": "a"}], "message 0 has no text in 'role', but None; it has from, value: set"),
        ([TALK[1]], "refuses it: Conversation roles must alternate"),
    ],
)
def test_rows_that_cannot_be_read_are_counted_and_the_first_is_told(messages: Any, words: str) -> None:
    encoder = RowEncoder("datasets.0", reader(LLAMA), 64)
    assert list(encoder({"messages": messages})) == list(encoder({"messages": 3})) == []
    assert len(list(encoder({"messages": TALK}))) == 1
    told = encoder.skipped()
    assert told.startswith("datasets.0: of 3 rows, 2 left out (")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(told)


def test_no_example_trains_on_nothing_wherever_it_is_cut() -> None:
    made = reader(CHATML)
    tokens, known = made({"messages": TALK})
    for length in range(2, 48):
        encoder = RowEncoder("datasets.0", made, length)
        examples = list(encoder({"messages": TALK}))
        assert len(examples) == known[1:length].any()
        assert encoder.left == (not examples) and encoder.cut == (length < len(tokens))
        for example in examples:
            assert example["input_ids"].tolist() == tokens[:length].tolist()
            assert example["labels"].tolist() == np.where(known, tokens, IGNORED)[:length].tolist()
        if not examples:
            assert "1 left out (: nothing to learn, no turn of assistant in what is not cut off)" in encoder.skipped()


def test_a_long_text_goes_on_in_the_next_example() -> None:
    encoder = RowEncoder("datasets.0", TextReader(ByteTokenizer()), 4)
    examples = list(encoder("abcdefgh"))
    assert [example["input_ids"].tolist() for example in examples] == [list(b"abcd"), list(b"efgh")]
    assert examples[0]["labels"].tolist() == [IGNORED, *b"bcd"]  # nothing stands before the first token
    assert [example["input_ids"].tolist() for example in encoder("abcde")][1:] == [[*b"e", 256]]
    assert encoder.skipped() == "" and encoder.cut == 0
