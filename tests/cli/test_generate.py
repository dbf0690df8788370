from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmcli.checkpoints.layout import MODEL, averaged_file, find_checkpoint
from swarmcli.cli.generate import Generation, checkpoint_named, generate, load, write_on
from swarmcli.errors import CheckpointError, UsageError
from swarmcli.training import CheckpointStore, build_task
from swarmcli.training.model_card import describe_model
from tests.cli.typed import typed
from tests.training.small_tasks import small

run = typed(generate)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says a letter of its own at each checkpoint, whatever it is given."""
    directory = tmp_path_factory.mktemp("generate")
    recipe = small(directory)
    task = build_task(recipe)
    store = CheckpointStore(
        directory / "runs" / "small" / "monitor-1" / "checkpoints",
        "small",
        describe=lambda place, epoch, samples: describe_model(place, recipe, task, epoch, samples, trainers=1),
    )
    for epoch, (letter, loss) in enumerate((("x", 1.0), ("y", 2.0)), 1):
        model: Any = task.build_model()
        with torch.no_grad():
            model.transformer.ln_f.weight.zero_()
            model.transformer.ln_f.bias.copy_(model.transformer.wte.weight[ord(letter)])
            model.transformer.wte.weight[ord(letter)] *= 100
        place = store.write(model, {}, epoch)
        assert place is not None and store.remember_loss(place, loss, 8) == (epoch == 1)
    return directory


@pytest.fixture(autouse=True)
def at_work(here: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)


def said(*words: str) -> str:
    return run(*words).stdout


def test_the_latest_checkpoint_writes_on_until_it_has_written_enough() -> None:
    assert said("ab", "-n", "5", "-t", "0") == "abyyyyy\n"
    assert said("best", "ab", "-n", "3", "-t", "0") == "abxxx\n"
    assert said("small", "ab", "-n", "1", "-t", "0") == "aby\n"
    assert said("runs/small/monitor-1/checkpoints/epoch-000001", "", "-n", "2", "-t", "0") == "xx\n"
    texts = [said("ab", "-n", "8", "-t", "10.0", "--seed", "1") for _ in range(2)]
    assert texts[0] == texts[1]
    for word, words in (
        ("other", "no checkpoint of the run other is on this computer; there are some of: small"),
        ("texts", "there is no checkpoint in texts"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint_named(word)


def test_the_average_over_epochs_writes_unless_the_weights_themselves_are_asked_for(work: Path, tmp_path: Path) -> None:
    path, other = (
        find_checkpoint(work / "runs" / "small" / "monitor-1" / "checkpoints" / name) for name in ("latest", "best")
    )
    both = shutil.copytree(path, tmp_path / "both")
    (both / "checkpoint.json").unlink()  # as a model of the Hub
    shutil.copy(other / MODEL, both / averaged_file(MODEL))
    assert said(str(both), "ab", "-n", "3", "-t", "0") == "abxxx\n"
    assert said(str(both), "ab", "-n", "3", "-t", "0", "--last-epoch") == "abyyy\n"


def test_a_model_that_reads_sixteen_tokens_writes_until_these_are_full() -> None:
    told = json.loads(said("ab", "-n", "500", "-t", "0", "--json"))
    assert (told["text"], told["tokens"], told["prompt"]) == ("y" * 14, 14, "ab")
    assert told["checkpoint"].endswith("epoch-000002")
    assert json.loads(said("a" * 50, "-n", "4", "--json", "-t", "0"))["text"] == "yyyy", "the end of the prompt counts"


def test_what_is_damaged_or_no_model_that_writes_is_said_at_once(work: Path, tmp_path: Path) -> None:
    copy = tmp_path / "epoch-000001"
    copy.mkdir()
    for file in (work / "runs/small/monitor-1/checkpoints/epoch-000001").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "model.safetensors").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged: its content is not what was written"):
        said(str(copy), "ab")
    (copy / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="holds a GPT2LMHeadModel, which does not load as a model"):
        said(str(copy), "ab")
    (copy / "config.json").write_text('{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}')
    with pytest.raises(CheckpointError, match="BertForSequenceClassification, which does not write text"):
        said(str(copy), "ab")
    with pytest.raises(UsageError, match="put the prompt in quotes"):
        said("latest", "two", "words")


@pytest.fixture
def talker(work: Path, tmp_path: Path) -> Path:
    """The same model, whose turns end with three of its letters."""
    copy = tmp_path / "talker"
    shutil.copytree(work / "runs/small/monitor-1/checkpoints/epoch-000002", copy)
    (copy / "checkpoint.json").unlink()
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('it is rude') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}yyy {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    return copy


def test_a_model_with_a_chat_template_answers_until_its_turn_ends(talker: Path) -> None:
    told = json.loads(said(str(talker), "ab", "-t", "0", "-n", "8", "--json"))
    assert (told["prompt"], told["text"], told["tokens"]) == ("ab", "", 3)
    assert said(str(talker), "ab", "-t", "0", "-n", "5", "--raw") == "abyyyyy\n"
    with pytest.raises(UsageError, match="refuses it: it is rude; --raw goes on"):
        said(str(talker), "no")
    with pytest.raises(UsageError, match="--system is for models with a chat template"):
        said("ab", "--system", "Be brief.")


def test_line_after_line_is_answered_by_what_was_said_before(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []

    def answer(model: object, tokenizer: object, wish: Generation, show: Any) -> tuple[str, int]:
        prompts.append(wish.prompt)
        show("well")
        return "well", 1

    monkeypatch.setattr("swarmcli.cli.generate.write_on", answer)
    ended = run("--chat", "--system", "s", talker, answers="a\nb\n")
    assert ended.stdout == "well\nwell\n\n"
    assert prompts == ["<system>syyy <user>ayyy <a>", "<system>syyy <user>ayyy <assistant>wellyyy <user>byyy <a>"]
    with pytest.raises(UsageError, match="there is no prompt"):
        said()


def test_the_mark_at_the_end_of_a_turn_is_not_shown(talker: Path) -> None:
    _, tokenizer = load(talker)
    shown: list[str] = []

    def generate(input_ids: torch.Tensor, streamer: Any, **options: Any) -> torch.Tensor:
        assert options["stop_strings"] == ["<end>"]
        written = tokenizer("a <b <end> c", return_tensors="pt")["input_ids"][0]
        streamer.put(input_ids)
        for token in written:
            streamer.put(token[None])
        streamer.end()
        return torch.cat([input_ids[0], written])[None]

    model = SimpleNamespace(config=SimpleNamespace(), generate=generate)
    text, _ = write_on(model, tokenizer, Generation("ab", 20, 0.0, None, "<end>", whole=True), shown.append)
    assert "".join(shown) == text == "a <b "
