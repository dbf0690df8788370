"""Makes recipes from the shipped ones: `swarm init` replaces entries of a shipped recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

TemplateName = Literal[
    "small", "medium", "gpt2", "home", "slow-links",
    "chat", "lora", "sequence-classification", "token-classification", "seq2seq", "masked-lm", "image-classification",
]  # fmt: skip
STDLIB = "stdlib"  # data: the sources of Python's own standard library, or rows that are made of them
SHIPPED = Path(__file__).parents[1] / "shipped"  # recipes/, which a checkout links to and a wheel brings along


def small_data_of(template: TemplateName) -> str:
    """Returns what `make_data` makes for the shipped recipe, a file or a directory below `data`; "": it needs none."""
    found = re.search(r"\bdata/(\w+(\.jsonl)?)", (SHIPPED / f"{template}.yaml").read_text(encoding="utf-8"))
    return found[1] if found else ""


def compose(
    file: str,
    run_id: str,
    *,
    template: TemplateName = "small",
    dataset: Mapping[str, Any] | None = None,
    data_dir: str = "",
    labels: Sequence[str] | None = None,
    base_model: str = "",
    revision: str = "",
    public: str = "",
    key: str = "",
) -> str:
    """Returns the text of a recipe. `file`: its name in comments. `dataset`: an item of `datasets`; None: the shipped
    one. `data_dir`: where the dataset's relative path begins on this computer; "": beside the recipe. `labels`: of the
    dataset's classes; () if they are not known, None for the shipped ones. `base_model`: a model of the Hub, at the
    commit `revision`; "": random weights. `public`: the run key of a closed run, whose other half is in the file `key`;
    "" for an open run."""
    shipped = (SHIPPED / f"{template}.yaml").read_text(encoding="utf-8")
    about, _, rest = shipped.partition("\nrun_id: ")
    # without the line for editors, and without what only a checkout needs
    about = about.partition("\n")[2].partition("\n#\n")[0]
    access = _INVITE.format(file=file, key=key, public=public) if public else _OPEN
    filled = {"run_id": f"run_id: {run_id}\n\n{access}\n", "output_dir": _OUTPUT}
    if dataset is not None:
        filled["datasets"] = _as_yaml({"datasets": [dict(dataset)]})
    if labels is not None:
        filled["labels"] = _as_yaml({"labels": list(labels)}, flow=True) if labels else _LABELS
    if base_model:
        filled |= {
            "base_model": _PRETRAINED.format(base_model=base_model, revision=revision),
            "tokenizer": "",  # the model has its own, with the template of its conversations
            "chat_template": "",
            "lora_target_modules": "lora_target_modules: all-linear\n",
            "optimizer": _OPTIMIZER.format(rate="2e-4" if template == "lora" else "2e-5"),
        }
    text = f"run_id: {rest}"
    for entry, instead in filled.items():
        text = re.sub(rf"(?m)^{entry}:.*\n(?: .*\n)*", instead.replace("\\", r"\\"), text, count=1)
    made = small_data_of(template) if dataset is None else ""
    head = _HEAD.format(file=file) + (_MADE.format(made=made) if made else "") + (_LORA if template == "lora" else "")
    local = _as_yaml({"local": {"data_dir": data_dir}}) if data_dir else ""
    return f"{about}\n{head}{text}{local and _OWN + local}"


def _as_yaml(value: Any, *, flow: bool = False) -> str:
    return yaml.safe_dump(
        value, sort_keys=False, allow_unicode=True, default_flow_style=None if flow else False, width=1000
    )


_HEAD = "# `swarm schema` lists every key; `swarm validate {file}` checks this file before anybody joins.\n"
_MADE = "# Its small data are made by: python -m swarmcli.shipped.make_data DIRECTORY/data {made}\n"
_LORA = "# All peers must have the same base: `swarm validate` prints the line frozen_weights to add here.\n"
_OUTPUT = "output_dir: runs          # journals, checkpoints and identities of the peers of this computer\n"
_OWN = "# Of this computer alone, so links leave it out: each volunteer has a place of its own.\n"
_PRETRAINED = """\
# A model of the Hugging Face Hub as it is at this commit, with its own tokenizer.
base_model: {base_model}
revision: {revision}
"""
_OPTIMIZER = "optimizer:\n  name: adamw\n  learning_rate: {rate}\n  weight_decay: 0.01\n  max_grad_norm: 1.0\n"
_LABELS = "labels: [first, second]   # write the names of the classes in your data\n"
_OPEN = """\
# Whoever has a link takes part. `swarm init --invite` begins a run that asks for invitations.
access: open
"""
_INVITE = """\
# Only whom you invite takes part: `swarm invite {file}`. The other half of this key is in {key}:
# keep that file, give it to nobody, and make a copy of it; without it nobody can be invited or revoked any more.
access: invite
run_key: {public}
"""
