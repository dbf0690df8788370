"""Small tokenizers with chat templates, and conversations, made here without any download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# As Llama 2: it trims, demands that turns alternate, and knows no system.
LLAMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
# As Qwen 3: an empty thought stands before the last answer, or, here, before all others.
THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and OPERATOR %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
)
THINKS_LAST, THINKS_BEFORE = (THOUGHTS.replace("OPERATOR", each) for each in ("loop.last", "not loop.last"))
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MARKS_NOTHING = CHATML + "{% generation %}{% endgeneration %}"
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
TALK = [
    {"role": "user", "content": "where are you"},
    {"role": "assistant", "content": "in the swarm"},
    {"role": "user", "content": "who else"},
    {"role": "assistant", "content": "  all the others \n"},
]


def chat_tokenizer(template: str | None = None, *, words: bool = False) -> Any:
    """A byte-level BPE, or one of whole words that knows no white space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    lines = [str(message["content"]) for message in TALK] + ["user assistant system [INST] [/INST]"] * 4
    if words:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer: Any = trainers.WordLevelTrainer(special_tokens=SPECIALS)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(lines, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIALS[2:4]
    )
    fast.chat_template = template
    return fast


def write_rows(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
