"""Keys that other trainers' files have (axolotl's, transformers' arguments), each with what to write here instead. `{}`
stands for the key's value."""

from __future__ import annotations

from collections.abc import Mapping

# Other names for keys of ours.
RENAMED = {
    "averager_rank": "rank",
    "batch_size": "micro_batch_size",
    "block_size": "sequence_len",
    "compression": "gradients",
    "dataset": "datasets",
    "lr": "learning_rate",
    "max_seq_length": "sequence_len",
    "model": "base_model",
    "num_warmup_steps": "warmup_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "revision_of_model": "revision",
    "scheduler": "lr_scheduler",
    "total_steps": "total_epochs",
    "warmup_steps": "warmup_epochs",
}
_PASSES = (
    "an epoch here is one optimizer step of the whole swarm, not a pass over the data; write `max_epochs: …`, {} × the "
    "number of samples / target_batch_size"
)
_EACH = "each volunteer chooses that; remove it, or write "
_ATTENTION = _EACH + "`local: {{attn_implementation: flash_attention_2}}`"
_OFTEN = "an epoch here is one optimizer step; write `{}: {{{{every_epochs: …}}}}`, for example 50"
HINTS: Mapping[str, str] = {
    **dict.fromkeys(("num_epochs", "epochs", "num_train_epochs"), _PASSES),
    "max_steps": "a step of the optimizer is an epoch here; write `max_epochs: {}`",
    "warmup_ratio": "write `lr_scheduler: {{warmup_epochs: …}}`, {} × max_epochs",
    "cosine_min_lr_ratio": "write `lr_scheduler: {{min_lr_ratio: {}}}`",
    "adam_beta1": "write `optimizer: {{betas: [{}, 0.999]}}`",
    "adam_beta2": "write `optimizer: {{betas: [0.9, {}]}}`",
    "adam_epsilon": "write `optimizer: {{eps: {}}}`",
    "peft": "what can be said of LoRA has keys of its own: write lora_r, peft_layers_to_transform and the like",
    "lora_target_linear": "write `lora_target_modules: all-linear`",
    "bf16": _EACH + "`local: {{dtype: bfloat16}}`",
    "fp16": _EACH + "`local: {{dtype: float16}}`",
    "tf32": _EACH + "`local: {{matmul_precision: high}}`",
    **dict.fromkeys(("flash_attention", "xformers_attention"), _ATTENTION),
    "sdp_attention": _EACH + "`local: {{attn_implementation: sdpa}}`",
    "eval_steps": "write `evaluation: {{every_epochs: {}}}`",
    "evals_per_epoch": _OFTEN.format("evaluation"),
    "save_steps": "write `checkpoint: {{every_epochs: {}}}`",
    "saves_per_epoch": _OFTEN.format("checkpoint"),
    "save_total_limit": "write `checkpoint: {{keep: {}}}`",
    "hub_model_id": "write `checkpoint: {{upload: {{repo: {}}}}}`",
    "message_field_role": "write `message_property_mappings: {{role: {}, content: …}}`",
    "message_field_content": "write `message_property_mappings: {{role: …, content: {}}}`",
    "message_field_training": "write `message_property_mappings: {{train: {}, role: …, content: …}}`",
    "roles": "human and gpt are read as user and assistant; remove it, or name the data's own in roles_to_train",
    "train_on_inputs": "of a conversation the model learns what roles_to_train of its dataset say; remove it",
    "text_column": "it is called field; rename it",
    "special_tokens": "they are the tokenizer's; remove it, and save them with one that `tokenizer` names",
    "include": "a recipe is one file; write the keys of {} here",
    "encoding": "files are UTF-8 here; save them so (Unix: iconv -f {}), and remove it",
    "groups": "all parameters have one learning_rate, and those decay that the Trainer has decay; remove it",
    "pieces": "a schedule has a name; write for example `lr_scheduler: {{name: warmup_stable_decay, decay_epochs: 9}}`",
    "hierarchy": "the processes of a site take every step together, so there are no levels to average at; remove it",
    "resume_from_checkpoint": "a peer goes on from its own newest checkpoint; remove it, or start with --resume",
}
# Keys without a counterpart, by the reason.
_NOTHING = {
    "the class follows from the config of base_model and from task": ("model_type", "tokenizer_type"),
    "each peer writes a journal, which `swarm monitor` shows in a browser": (
        "wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "logging_steps",
    ),
    "rows are read while training, and nothing is prepared": (
        "dataset_prepared_path", "pad_to_sequence_len", "group_by_length", "eval_sample_packing", "ds_type",
    ),
    "a peer holds the whole model, and `local.site` has several devices work as one peer": (
        "deepspeed", "fsdp", "fsdp_config",
    ),
    "it is always so here": ("strict", "gradient_checkpointing_kwargs", "save_safetensors"),
}  # fmt: skip
HINTS = {**HINTS, **{key: f"{why}; remove it" for why, keys in _NOTHING.items() for key in keys}}
VALUES: Mapping[tuple[str, str], str] = {
    ("type", "chat_template"): "a text file has no conversations in it; write them as JSON lines, `path: chats.jsonl`",
    ("adapter", "qlora"): "write `adapter: lora`, and keep `load_in_4bit: true`",
    **dict.fromkeys(
        (("type", "alpaca"), ("type", "sharegpt"), ("type", "chat_template.default")),
        "make conversations of its rows, [{role: user, content: …}, {role: assistant, content: …}], and write "
        "`type: chat_template`",
    ),
}
