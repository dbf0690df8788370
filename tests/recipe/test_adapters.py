"""The keys of adapters: each combination that cannot be meant is refused with key, value and fix."""

from __future__ import annotations

import pytest

from swarmcli.recipe import fingerprint_of
from swarmcli.recipe.adapters import FIELDS, KEYS, adapter_fields
from tests.recipe.recipes import SMALL, refused, small


def test_keys_are_the_fields_that_peft_has_for_them() -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    for name, fields in {**FIELDS, "lora": (*FIELDS["lora"], *KEYS.values())}.items():
        assert set(fields) <= PEFT_TYPE_TO_CONFIG_MAPPING[name.upper()].__dataclass_fields__.keys()


def test_what_a_recipe_says_becomes_those_fields() -> None:
    recipe = small("adapter=lora", "lora_r=4", "lora_target_modules=[c_attn]", "peft={layers_to_transform: [0]}")
    fields = adapter_fields(recipe)
    assert (fields["r"], fields["target_modules"], fields["layers_to_transform"]) == (4, ["c_attn"], [0])
    assert adapter_fields(small("adapter=ia3")) == {}
    assert fingerprint_of(recipe)["lora_r"] != fingerprint_of(small("adapter=lora"))["lora_r"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("lora_r=4",), "lora_r is of an adapter, and the recipe names none; add `adapter: lora`"),
        (("adapter=ia3", "lora_r=4"), "lora_r is of LoRA, and the adapter is ia3"),
        (("adapter=lora", "peft={r: 4}"), "peft.r is a key of its own: write lora_r"),
        (("adapter=lora", "peft={use_dora: true}"), "peft.use_dora: no field of lora that a run can have"),
        (("adapter=loha", "peft={rank_dropuot: 0.1}"), "did you mean rank_dropout"),
        (("adapter=lora", "lora_target_modules=['']"), "lora_target_modules: modules are named one by one; write"),
        (("adapter=loha", "peft={target_modules: '(a+)+b'}"), "peft.target_modules: modules are named one by one;"),
        (("adapter=lora", "unfrozen_parameters=[lm_head]"), "with an adapter nothing of the base is trained"),
        (("adapter=lora", "local.site.processes=2"), "a site of several processes trains no adapter"),
        (("adapter=lora", "load_in_8bit=true"), "what is quantized are the weights of a saved model"),
        (("adapter=lora", "base_model=x", "load_in_8bit=true", "load_in_4bit=true"), "in 8 bits or in 4"),
    ],
)
def test_what_cannot_be_meant(overrides: tuple[str, ...], says: str) -> None:
    assert says in refused(SMALL, *overrides)
