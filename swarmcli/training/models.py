"""Models of transformers as a recipe names them: a config with its fields, or a saved model with its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from swarmcli.checkpoints.layout import ADAPTER_CONFIG
from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.recipe.pretrained import CONFIG, Pretrained, saved_model
from swarmcli.training.adapters import BUILDING, adapted, base_dtype, load_quietly
from swarmcli.training.freezing import freeze
from swarmcli.words import first_words

# Fields of a config that have to fit each other.
_SIZES = re.compile(r"(_heads?|_dim|_size|_layers?|experts|_groups?|_rank|_window|_per_tok|top_?k|n_embd|d_model)$")


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The models that a task can train."""

    auto: str  # the Auto class of transformers that makes them
    listed: str  # transformers' table of their architectures, in models.auto.modeling_auto
    called: str  # the name in messages
    usual: tuple[str, ...]  # model types that a message offers
    # pattern of the parts of composite models for which the task has no data; most tasks have only text
    foreign: str = "vision|audio|vq_"
    loss_type: str | None = None  # for architectures that leave it open: transformers would warn in each process


class ModelSource:
    """Builds the model that a recipe names, for one task."""

    def __init__(
        self,
        recipe: Recipe,
        kind: ModelKind,
        *,
        defaults: Callable[[Any], Mapping[str, Any]],
        decided: Mapping[str, Any] | None = None,
        refuse: Callable[[Any, bool | None], str | None] = lambda config, is_decoder: None,
    ) -> None:
        """`defaults(usual)` returns fields of a config that the recipe may leave out, by the names that transformers
        has for all architectures; `usual` is the architecture's own config. `decided`: fields that other keys of the
        recipe decide, also for a saved model; a head that does not fit them is made anew. `refuse(config, is_decoder)`
        is asked about architectures that transformers lists for the task. It returns None if the task can use such a
        config, else how to change the config so that it can, as the beginning of an error's fix ("": in no way)."""
        self._recipe = recipe
        self._kind = kind
        self._defaults = defaults
        self._decided = dict(decided or {})
        self._asked = refuse

    def build(self, *, outline: bool = False) -> nn.Module:
        """Returns the model on the CPU in float32, in training mode. Its initial weights depend on the recipe's seed
        alone.

        The base of an adapter is held as `local.base_dtype` and quantization say, if its weights are here: see
        training/adapters.py. `outline`: the same shapes on the meta device. If the weights are neither here nor to be
        had, the model is built from its config, and its `lacks_weights` is True. Raises RecipeError when transformers
        cannot build it, or the task cannot use it.
        """
        with BUILDING:
            return self._build(outline)

    def _build(self, outline: bool) -> nn.Module:
        base_model, saved = self._recipe.base_model, saved_model(self._recipe)
        beside = self._recipe.adapter is not None
        shapes = outline or (beside and saved is not None)  # `adapted` loads the weights of a base
        # The caller's own random numbers (dropout, its data) must not depend on whether a model was built before.
        with torch.random.fork_rng(devices=[]), torch.device("meta") if shapes else nullcontext():
            torch.manual_seed(self._recipe.seed)
            model: Any
            if saved is not None:
                model = self._load(saved, shapes)
            else:
                assert isinstance(base_model, Mapping)
                model = self._create(base_model)
        model.config.use_cache = False  # a cache of keys and values serves generation, not training
        if self._kind.loss_type is not None and getattr(model, "loss_type", "") is None:
            model.loss_type = self._kind.loss_type
        self._choose_ways(model)
        if beside:
            return adapted(self._recipe, model, self._kind.auto, outline=outline)
        return freeze(self._recipe, model.float().train())

    def _choose_ways(self, model: Any) -> None:
        """Has the model compute in the ways that the recipe asks for. They change how fast it is and what it keeps."""
        recipe = self._recipe
        if (attention := recipe.local.attn_implementation) is not None:
            try:
                model.set_attn_implementation(attention)
            except (ImportError, ValueError) as error:
                raise RecipeError(
                    f"{recipe.origin('local', 'attn_implementation')}: local.attn_implementation: {attention} cannot "
                    f"be used here ({first_words(error)}); take another, or leave it out"
                ) from error
        if recipe.gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise RecipeError(
                    f"{recipe.origin('gradient_checkpointing')}: gradient_checkpointing: transformers computes a "
                    f"{model.config.model_type} only with all that it keeps; remove it, or take another model_type"
                )
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _create(self, fields: Mapping[str, Any]) -> nn.Module:
        from transformers import AutoConfig

        told = dict(fields)
        try:
            usual = self._check_fields(fields)
            fields = {k: float(value) if isinstance(getattr(usual, k), float) else value for k, value in fields.items()}
            if "text_config" in usual.sub_configs:  # a composite model, whose part for text has the sizes
                fields["text_config"] = self._completed(usual.text_config, fields.get("text_config") or {})
            fields = self._completed(usual, fields)
            told = {**usual.to_dict(), **fields}
            config = AutoConfig.for_model(**{**fields, **self._decided})
            config.architectures = config.architectures or []  # transformers looks through them
            model: nn.Module = self._auto().from_config(config, dtype=base_dtype(self._recipe))
        except RecipeError:
            raise
        except Exception as error:  # architectures raise whatever their constructors meet
            raise self.misfit("transformers cannot build this model", error, told) from error
        return model

    def _completed(self, usual: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields, with those added that a recipe may leave out. An architecture may have another name for
        one (GPT-2: n_positions); the config knows both names."""
        names = usual.attribute_map
        given = {names.get(key, key): value for key, value in fields.items()}
        heads, width = (given.get(names.get(key, key)) for key in ("num_attention_heads", "hidden_size"))
        fitting = {}
        if isinstance(heads, int) and isinstance(width, int) and min(heads, width) > 0:
            # The architecture's usual number is replaced where it does not divide sizes that the recipe names.
            sizes = {"num_key_value_heads": heads, "decoder_attention_heads": width, "head_dim": 0}
            told = {name: number for name, number in usual.to_dict().items() if isinstance(number, int | None)}
            unfit = [name for name in sizes.keys() & told if not (number := told[name]) or sizes[name] % number]
            fitting = {name: heads if name != "head_dim" else width // heads for name in unfit}
        defaults = {names.get(key, key): value for key, value in {**fitting, **self._defaults(usual)}.items()}
        return {**{key: value for key, value in defaults.items() if key not in given}, **fields}

    def misfit(self, problem: str, error: Exception, fields: Mapping[str, Any]) -> RecipeError:
        """Returns the error for what an architecture raised; it names the fields of the config that have to fit each
        other."""
        told = text if isinstance(text := fields.get("text_config"), dict) else fields
        sizes = [f"{key} {'null' if n is None else n}" for key, n in told.items() if _SIZES.search(key)]
        made = isinstance(self._recipe.base_model, Mapping)
        fix = "install it" if isinstance(error, ImportError) else "correct what does not fit of its fields"
        fix = f"{fix}, or take another" if made else "take another"
        return self.refuse(f"{problem}: {first_words(error)}", f"{fix}: it has {', '.join(sizes) or 'no sizes'}")

    def _check_fields(self, fields: Mapping[str, Any]) -> Any:
        """Refuses fields that the architecture does not have; returns its usual config."""
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        model_type = fields["model_type"]
        if model_type not in CONFIG_MAPPING:
            near = get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=1)
            hint = f"did you mean {near[0]}?" if near else "write one that this transformers knows, for example gpt2"
            raise self.refuse(f"unknown model_type {model_type!r}", hint, "model_type")
        config = AutoConfig.for_model(model_type)
        self._check_kind(config, fields.get("is_decoder", getattr(config, "is_decoder", None)))
        known = {*config.to_dict(), *config.attribute_map}
        for key in fields:
            if key in self._decided:
                raise self.refuse(f"{key} follows from labels", "remove it", key)
            if key not in known or key.startswith("_"):
                near = get_close_matches(key, sorted(known), n=1)
                hint = f"did you mean {near[0]}?" if near else "remove it"
                raise self.refuse(f"a {model_type} config has no field {key!r}", hint, key)
        return config

    def _check_kind(self, config: Any, is_decoder: bool | None) -> None:
        """Refuses a model that is not of the task's kind."""
        from transformers.models.auto import modeling_auto

        listed, name = getattr(modeling_auto, self._kind.listed), config.model_type
        fix = self._asked(config, is_decoder) if name in listed else ""
        if fix is None:
            self._check_parts(config)
            return
        usual = ", ".join(each for each in self._kind.usual if each in listed)
        raise self.refuse(
            f"this recipe trains {self._kind.called}; {name} is none",
            f"{fix}take one of {usual}, or another that {self._kind.auto} of transformers lists",
            "model_type",
        )

    def _check_parts(self, config: Any) -> None:
        """Refuses a composite model with parts that would never see data, unless transformers builds its part for text
        alone."""
        parts = [each for each in config.sub_configs if self._kind.foreign and re.search(self._kind.foreign, each)]
        built = self._auto()._model_mapping[type(config)].config_class if parts else None
        if parts and built is not config.sub_configs.get("text_config"):
            raise self.refuse(
                f"{config.model_type} is a composite model, with a {' and a '.join(parts)}, of which nothing would be "
                f"trained by {self._recipe.task}",
                "take a model of text alone",
                "model_type",
            )

    def _load(self, saved: Pretrained, outline: bool) -> nn.Module:
        from transformers import AutoConfig

        directory = saved.directory()
        if not (directory / CONFIG).is_file():
            raise self.refuse(
                f"{directory} is no directory with a saved model (it has no {CONFIG})",
                "download the model there first, or name one of the Hugging Face Hub with its revision",
            )
        if (directory / ADAPTER_CONFIG).is_file():
            raise self.refuse(
                f"{directory} holds an adapter, and no whole model",
                "merge it by swarm export --merge",
            )
        trusted = self._recipe.local.trust_remote_code
        model: nn.Module
        try:
            config = AutoConfig.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trusted, **self._decided
            )
            if not (trusted and hasattr(config, "auto_map")):  # code of its own knows best
                self._check_kind(config, getattr(config, "is_decoder", None))

            def most() -> int:
                """An upper bound of the bytes of its files: the largest numbers, and what lies beside them."""
                with torch.device("meta"):
                    sizes = self._auto().from_config(config, trust_remote_code=trusted)
                return 8 * sum(parameter.numel() for parameter in sizes.parameters()) + (64 << 20)

            weights = None if outline else saved.weights(most)
            if weights is None:
                model = self._auto().from_config(config, trust_remote_code=trusted, dtype=base_dtype(self._recipe))
                model.lacks_weights = not outline  # type: ignore[assignment]  # no module, as modules may hold
            else:
                model = load_quietly(
                    self._auto(),
                    str(weights),
                    config=config,  # the one that counts in the fingerprint
                    ignore_mismatched_sizes=bool(self._decided),
                    local_files_only=True,
                    use_safetensors=True,  # the older format is a pickle, which can run code
                    trust_remote_code=trusted,
                )
        except RecipeError:
            raise
        except Exception as error:  # as above
            raise self.refuse(
                f"no model can be loaded from {directory}: {first_words(error)}",
                f"it must be one of the {self._kind.called}, saved as safetensors; if it brings code of its own that "
                "you have read and trust, set local.trust_remote_code",
            ) from error
        return model

    def _auto(self) -> Any:
        import transformers

        return getattr(transformers, self._kind.auto)

    def refuse(self, problem: str, fix: str, *keys: str) -> RecipeError:
        """The error for what is wrong with the recipe's base_model, at one of its keys."""
        return RecipeError(f"{self._recipe.origin('base_model', *keys)}: base_model: {problem}; {fix}")
