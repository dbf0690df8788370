"""Models as transformers has them: which architectures train with a recipe's sizes, and with the tokens of its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.errors import RecipeError
from swarmcli.peer.collaboration import Collaboration
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from swarmcli.training import build_task
from swarmcli.training.tasks import built_in

from .small_tasks import small
from .test_row_tasks import CPU, recipe_for

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
OF_IMAGES = {"image_size": 32, "patch_size": 8}
# Of each task the architectures that do not train with these sizes, and what a recipe of them is told first. "large":
# those sizes are not all, and what is left has more than 60 million parameters.
TABLE = Path(__file__).with_name("families.json")
TASKS = ("causal_lm", "masked_lm", "seq2seq", "sequence_classification", "token_classification", "image_classification")


def fields_of(family: str, task: str) -> dict[str, Any]:
    """Those of our sizes that are a whole number in the config of this architecture."""
    from transformers import AutoConfig

    try:
        usual = AutoConfig.for_model(family)
        own = {*usual.to_dict(), *usual.attribute_map}
        wanted = SIZES | (OF_IMAGES if task == "image_classification" else {})
        return {key: size for key, size in wanted.items() if key in own and isinstance(getattr(usual, key), int)}
    except Exception:  # a config that is made of others
        return {}


def trained_once(task: Any) -> str:
    """ "": a model of the task computes a finite loss, and a step changes what it has; or "large"."""
    if sum(parameter.numel() for parameter in task.build_model(outline=True).parameters()) > 60e6:
        return "large"
    model = task.build_model()
    task.try_model(model, CPU)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = task.loss(model, task.trial(24))
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return "" if loss.isfinite() and changed else f"a loss of {loss}, and weights that changed: {changed}"


def outcome(task: str, family: str, directory: Path, **fields: Any) -> str:
    """As `trained_once`, or what the recipe is told; anything else that is raised is a fault."""
    written = json.dumps({"model_type": family, **(fields or fields_of(family, task))})
    labels = ["labels=[a, b]"] if task.endswith("classification") else []
    try:
        return trained_once(build_task(recipe_for(task, written, directory, "micro_batch_size=2", *labels)))
    except RecipeError as error:
        return str(error).partition("base_model: ")[2]


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_every_architecture_trains_with_small_sizes_or_is_refused_in_words(tmp_path: Path, task: str) -> None:
    from transformers.models.auto import modeling_auto

    refused = json.loads(TABLE.read_text())[task]
    listed = getattr(modeling_auto, built_in(task).kind.listed)
    found = {family: outcome(task, family, tmp_path) for family in listed}
    wrong = {
        f: said for f, said in found.items() if not said.startswith(refused.get(f, "")) or (said and f not in refused)
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("task", "family"),
    [
        ("causal_lm", "phi3"),  # its padding is beyond our vocabulary
        ("causal_lm", "mistral"),  # its 8 heads for keys do not divide 2
        ("causal_lm", "ministral"),  # it does not tell the width of a head
        ("masked_lm", "esm"),  # positions begin behind the padding
        ("seq2seq", "m2m_100"),  # a table has a row for the padding
        ("image_classification", "deit"),  # two classes of transformers make it
    ],
)
def test_what_is_usual_for_an_architecture_gives_way_to_the_recipe(tmp_path: Path, task: str, family: str) -> None:
    assert outcome(task, family, tmp_path) == ""


def test_xlnet_is_given_no_number_of_positions(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "n_head": 2, "d_head": 16, "n_layer": 1, "d_inner": 32}
    assert outcome("sequence_classification", "xlnet", tmp_path, **sizes) == ""


def test_tokens_and_vocabulary_of_a_part_for_text_follow_the_tokenizer(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3_5", "text_config": {**SIZES, "layer_types": ["full_attention"] * 2}}
    model: Any = build_task(recipe_for("causal_lm", json.dumps(fields), tmp_path)).build_model()
    assert (model.config.vocab_size, model.config.eos_token_id, model.config.hidden_size) == (259, 256, 32)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"model_type": "gptj", "n_embd": 32, "n_layer": 1, "n_head": 2},
            "n_embd 32, n_layer 1, n_head 2, rotary_dim 64",
        ),
        ({"model_type": "mixtral", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3"),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": -2}, "n_head -2"),
    ],
)
def test_sizes_that_do_not_fit_are_told_before_a_trainer_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], words: str
) -> None:
    recipe, joined = small(tmp_path, f"base_model={json.dumps(fields)}", "local.host=127.0.0.1"), list[Any]()
    monkeypatch.setattr("swarmcli.peer.collaboration.Optimizer", lambda **options: joined.append(options))
    with Home.at(tmp_path / "home") as home, join_run(recipe, "trainer", home) as peer:
        with pytest.raises(RecipeError, match=r"base_model: this model cannot compute: .*") as caught:
            Collaboration(peer)
        assert words in str(caught.value) and not joined


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "clip", "text_config": 5}, "transformers cannot build this model"),
        ({"model_type": "mobilenet_v2", "image_size": 32}, "cannot compute: Expected more than 1 value per channel"),
    ],
)
def test_what_a_recipe_for_images_cannot_have_is_told(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    options = "labels=[a, b]", "micro_batch_size=1"
    task: Any = build_task(recipe_for("image_classification", json.dumps(fields), tmp_path, *options))
    with pytest.raises(RecipeError, match=words):
        task.try_model(task.build_model(), CPU)


def test_nothing_stays_of_the_try(tmp_path: Path) -> None:
    fields = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    task: Any = build_task(recipe_for("image_classification", json.dumps(fields), tmp_path, "labels=[a, b]"))
    model = task.build_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    task.try_model(model, CPU)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# saved models


def save_words(directory: Path, *further: str) -> int:
    """A tokenizer of whole words without a token for padding, as GPT-2's has none; returns the number of its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<end>", "the", "swarm", "trains", *further])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)
    return len(words)


def save(directory: Path, auto: str, **fields: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**fields)
    model = getattr(transformers, auto).from_config(config)
    model.save_pretrained(directory)
    return model.eval()


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoder_sorts_texts_by_the_last_word_of_each(tmp_path: Path, family: str, padding: int | None) -> None:
    """Each text alone, through the model as it is, needs no padding. `padding`: as the saved config has it."""
    count = save_words(tmp_path / "saved")
    kind = "AutoModelForSequenceClassification"
    plain = save(
        tmp_path / "saved", kind, model_type=family, **SIZES, num_labels=2, vocab_size=count, pad_token_id=padding
    )
    plain.config.pad_token_id = None
    task: Any = build_task(recipe_for("sequence_classification", "saved", tmp_path, "labels=[a, b]"))
    rows = [task.encode({"text": text, "label": 0}) for text in ("the swarm trains", "trains", "trains the")]
    model = task.build_model().eval()
    alone = torch.cat([plain(input_ids=torch.tensor(row["input_ids"])[None].long()).logits for row in rows])
    torch.testing.assert_close(model(**task.collate(rows)).logits, alone)


def test_a_saved_model_that_does_not_say_how_an_answer_begins_has_it_begin_by_padding(tmp_path: Path) -> None:
    count = save_words(tmp_path / "saved")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    save(tmp_path / "saved", "AutoModelForSeq2SeqLM", model_type="t5", **sizes, vocab_size=count, pad_token_id=None)
    assert trained_once(build_task(recipe_for("seq2seq", "saved", tmp_path))) == ""


def test_a_tokenizer_of_its_own_with_more_tokens_than_the_model_is_refused_with_the_way(tmp_path: Path) -> None:
    count = save_words(tmp_path / "saved")
    save(tmp_path / "saved", "AutoModelForCausalLM", model_type="llama", **SIZES, vocab_size=count)
    assert save_words(tmp_path / "saved", "further") == count + 1
    with pytest.raises(RecipeError) as caught:
        build_task(small(tmp_path, "base_model=saved", "tokenizer=null")).build_model(outline=True)
    resized = f"save it with as many tokens, by its resize_token_embeddings({count + 1})"
    assert f"base_model: the model knows {count} tokens, the tokenizer has {count + 1}; {resized}" in str(caught.value)
