"""Causal language modelling: predict the next token, with any decoder of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.training.data import TextStream, evaluation_batches, text_batches
from swarmcli.training.freezing import freeze
from swarmcli.training.task import Batch
from swarmcli.training.tokenizer import Tokenizer, load_tokenizer
from swarmcli.words import first_words

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")  # as transformers calls them
_USUAL = ("gpt2", "gpt_neox", "llama", "mistral", "qwen3", "gemma", "phi3", "olmo2", "smollm3", "mamba")
_DECODERS = ("gpt_neox", "gpt_neox_japanese", "trocr")  # although their configs do not call them so
_BOTH_WAYS = ("flaubert", "xlm", "xlnet")  # whatever their configs say


class CausalLanguageModelling:
    """The task `causal_lm` of a recipe. A sample is a sequence of `sequence_len` tokens."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._recipe = recipe
        self.tokenizer = tokenizer

    def build_model(self, *, outline: bool = False) -> nn.Module:
        """The model on the CPU in float32. Its initial weights depend on the recipe's seed alone.

        `outline`: the same shapes on the meta device. Raises RecipeError when transformers cannot build it, or it
        cannot hold the tokens.
        """
        base_model = self._recipe.base_model
        # The caller's own random numbers (dropout, its data) must not depend on whether a model was built before.
        with torch.random.fork_rng(devices=[]), torch.device("meta") if outline else nullcontext():
            torch.manual_seed(self._recipe.seed)
            model: Any
            if isinstance(base_model, str):
                model = self._load(self._recipe.locate(base_model), outline)
            else:
                model = self._create(base_model)
        self._check_sizes(model.config)
        model.config.use_cache = False  # a cache of keys and values serves generation, not training
        if getattr(model, "loss_type", "") is None:
            # GPT-2 and others leave it open, and transformers would warn in each process.
            model.loss_type = "ForCausalLM"
        return freeze(self._recipe, model.float().train())

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> TextStream:
        return text_batches(self._recipe, self.tokenizer, seed, position)

    def evaluation_batches(self) -> list[Batch]:
        return evaluation_batches(self._recipe, self.tokenizer)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean negative log likelihood in nats per token; the model shifts the labels itself."""
        loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        return loss

    def save_preprocessing(self, directory: Path) -> None:
        self.tokenizer.save(directory)

    def _create(self, fields: Mapping[str, Any]) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        usual = self._check_fields(fields)
        fields = {
            key: float(value) if isinstance(getattr(usual, key), float) else value for key, value in fields.items()
        }
        defaults = {
            "vocab_size": self.tokenizer.vocab_size,
            "max_position_embeddings": self._recipe.sequence_len,
            "bos_token_id": self.tokenizer.end_of_text,
            "eos_token_id": self.tokenizer.end_of_text,
        }
        try:
            # An architecture may call its fields otherwise (GPT-2: n_positions); the config knows both names.
            names = usual.attribute_map
            given = {names.get(key, key) for key in fields}
            defaults = {names.get(k, k): v for k, v in defaults.items() if names.get(k, k) not in given}
            config = AutoConfig.for_model(**{**defaults, **fields})
            self._check_shape(config, fields)
            model: nn.Module = AutoModelForCausalLM.from_config(config)
        except RecipeError:
            raise
        except Exception as error:  # architectures raise whatever their constructors meet
            raise self._refuse(
                f"transformers cannot build this model: {first_words(error)}", "correct its fields"
            ) from error
        return model

    def _check_fields(self, fields: Mapping[str, Any]) -> Any:
        """Refuses fields that the architecture does not have, or not of this kind; returns its usual config."""
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        model_type = fields["model_type"]
        if model_type not in CONFIG_MAPPING:
            near = get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=1)
            hint = f"did you mean {near[0]}?" if near else "write one that this transformers knows, for example gpt2"
            raise self._refuse(f"unknown model_type {model_type!r}", hint, "model_type")
        config = AutoConfig.for_model(model_type)
        self._check_causal(config, fields.get("is_decoder", getattr(config, "is_decoder", None)))
        known = {*config.to_dict(), *config.attribute_map}
        for key in fields:
            if key not in known or key.startswith("_"):
                near = get_close_matches(key, sorted(known), n=1)
                hint = f"did you mean {near[0]}?" if near else "remove it"
                raise self._refuse(f"a {model_type} config has no field {key!r}", hint, key)
            usual, kind = getattr(config, key), type(fields[key])
            wanted = None if key.endswith("token_id") else _KINDS.get(type(usual))  # of those one, several or none
            if wanted and kind is not type(usual) and (type(usual), kind) != (float, int):
                problem = f"{key} should be {wanted}, not {fields[key]!r}"
                raise self._refuse(problem, f"it is usually {usual!r}", key)
        return config

    def _check_causal(self, config: Any, is_decoder: bool | None) -> None:
        """Refuses what is no causal language model: it would see the tokens that it is to predict."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

        name = config.model_type
        encoder = is_decoder is False and not config.is_encoder_decoder and name not in _DECODERS
        if name in CAUSAL and not encoder and name not in _BOTH_WAYS:
            return
        fix = "set is_decoder: true to have it read one way, or " if name in CAUSAL and encoder else ""
        usual = ", ".join(each for each in _USUAL if each in CAUSAL)
        raise self._refuse(
            f"this recipe trains causal language models; {name} is none",
            f"{fix}take one of {usual}, or another that AutoModelForCausalLM of transformers lists",
            "model_type",
        )

    def _check_shape(self, config: Any, fields: Mapping[str, Any]) -> None:
        """Refuses, in the recipe's words, sizes that architectures take silently or refuse in terms of their code."""
        names = {each: each if each in fields else config.attribute_map.get(each, each) for each in _SIZES}
        sizes = {each: size for each in _SIZES if isinstance(size := getattr(config, each, None), int)}
        for each, size in sizes.items():
            if size < 1:
                raise self._refuse(f"{names[each]} is {size}", "write a whole number of 1 or more", names[each])
        width, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
        if width and heads and width % heads and not isinstance(getattr(config, "head_dim", None), int):
            fitting = min((n for n in range(1, width + 1) if width % n == 0), key=lambda n: abs(n - heads))
            key = names["num_attention_heads"]
            raise self._refuse(
                f"{key} {heads} does not divide {names['hidden_size']} {width}", f"take {fitting} for example", key
            )

    def _load(self, directory: Path, outline: bool) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        if not (directory / "config.json").is_file():
            raise self._refuse(
                f"{directory} is no directory with a saved model (it has no config.json)",
                "download the model there first; a recipe downloads none",
            )
        trusted = self._recipe.local.trust_remote_code
        model: nn.Module
        try:
            config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trusted)
            if not hasattr(config, "auto_map"):  # code of its own knows best
                self._check_causal(config, getattr(config, "is_decoder", None))
            # Where all that is not trained comes from other peers the config will do: the rest comes with the state.
            if outline or (self._recipe.frozen_weights and not any(directory.glob("*.safetensors"))):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    str(directory),
                    local_files_only=True,
                    use_safetensors=True,  # the older format is a pickle, which can run code
                    trust_remote_code=trusted,
                )
        except RecipeError:
            raise
        except Exception as error:  # as above
            raise self._refuse(
                f"no model can be loaded from {directory}: {first_words(error)}",
                "it must be a causal language model saved as safetensors; if it brings code of its own that you have "
                "read and trust, set local.trust_remote_code",
            ) from error
        return model

    def _check_sizes(self, config: Any) -> None:
        if config.vocab_size < self.tokenizer.vocab_size:
            raise self._refuse(
                f"the model knows {config.vocab_size} tokens, the tokenizer has {self.tokenizer.vocab_size}",
                "raise vocab_size, or leave it out to have it follow the tokenizer",
                "vocab_size",
            )
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and positions < self._recipe.sequence_len:
            raise self._refuse(
                f"the model reads {positions} tokens at most, sequence_len is {self._recipe.sequence_len}",
                f"lower sequence_len to {positions}",
            )

    def _refuse(self, problem: str, fix: str, *keys: str) -> RecipeError:
        return RecipeError(f"{self._recipe.origin('base_model', *keys)}: base_model: {problem}; {fix}")


def build_task(recipe: Recipe) -> CausalLanguageModelling:
    """The task that a recipe names: so far there is this one. Raises RecipeError or DataError, each with the fix."""
    return CausalLanguageModelling(recipe, load_tokenizer(recipe))
