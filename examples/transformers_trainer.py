"""transformers.Trainer as one peer of a run: `make_trainer` says what has to be set, and why.

    python -m examples.transformers_trainer                       # prints an address
    python -m examples.transformers_trainer --seed 1 --peer tcp://…

Each peer trains until Ctrl-C, or for --batches. Trainer keeps its loop, its logging and its checkpoints. What it calls
an epoch is a pass over this peer's data, and `max_steps` counts this peer's batches; how far the run is says
`optimizer.local_epoch`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import swarmcli

# isort: split
# torch after swarmcli: its threads then sleep while they wait, and leave the cores to other peers.
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from examples.peers import Say, arguments, invite, run, tell_epochs

TARGET, BATCH, ACCUMULATE = 1024, 4, 2
LENGTH, WORDS = 16, 32


class SwarmSchedule:
    """Stands where Trainer expects its scheduler. The rate is the swarm's: it moves once per epoch of all peers.

    A scheduler of Trainer's own would move it at every batch of this peer, which the Optimizer refuses.
    """

    def __init__(self, optimizer: swarmcli.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Does nothing: the swarm's Optimizer steps the real schedule, at the end of an epoch."""

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {}  # the optimizer's state holds the schedule

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the optimizer's state holds the schedule."""


class SwarmCallback(TrainerCallback):
    """Counts the samples of each step, tells the others the loss, and ends training with the run."""

    def __init__(self, optimizer: swarmcli.Optimizer, last_epoch: int | None) -> None:
        """`last_epoch`: the epoch of the run at which this peer leaves; None: it leaves when Trainer ends."""
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.batches = 0

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        # Raises now, rather than at the first step, if Trainer (or trl, by `peft_config`) has frozen what the Optimizer
        # trains.
        self.optimizer.core.replica.placement.check_trained()

    def on_step_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self.batches = 1

    def on_substep_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self.batches += 1

    def on_pre_optimizer_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        # Before the end of the data there may be fewer batches than gradient_accumulation_steps.
        self.optimizer.batch_size_per_step = self.batches * args.per_device_train_batch_size

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.optimizer.note_loss(float(logs["loss"]), self.optimizer.batch_size_per_step or 1)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if self.last_epoch is not None and self.optimizer.local_epoch >= self.last_epoch:
            control.should_training_stop = True


def make_optimizer(dht: swarmcli.DHT, model: torch.nn.Module, decay: int = 100) -> swarmcli.Optimizer:
    """The model has to be on its device already, and the optimizer has to be made before Trainer sees it.

    `decay`: epochs over which the learning rate falls to a tenth; all peers have to give the same.
    """
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return swarmcli.Optimizer(
        dht=dht,
        run_id="trainer",
        target_batch_size=TARGET,
        batch_size_per_step=BATCH * ACCUMULATE,
        optimizer=inner,
        scheduler=torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.1, total_iters=decay),
        max_grad_norm=1.0,  # of the average of all peers, as one process with the whole batch would clip
    )


def make_trainer(
    model: Any, data: Any, optimizer: swarmcli.Optimizer, seed: int, place: str, epochs: int | None = None
) -> Trainer:
    settings = TrainingArguments(
        output_dir=place,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_drop_last=True,  # so that every batch has the size that SwarmCallback counts
        data_seed=seed,  # every peer shuffles in its own way
        max_grad_norm=0.0,  # off: the Optimizer clips the average, and refuses a Trainer that clips each small batch
        max_steps=1_000_000_000,  # Ctrl-C or SwarmCallback end the training
        logging_steps=500,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        # fp16 would bring a GradScaler of torch's, which knows nothing of steps that only accumulate; bf16 is fine.
    )
    return Trainer(
        model=model,
        args=settings,
        train_dataset=data,
        optimizers=(optimizer, SwarmSchedule(optimizer)),  # type: ignore[arg-type]
        callbacks=[SwarmCallback(optimizer, epochs)],
    )


def small_model() -> GPT2LMHeadModel:
    settings = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    settings.resid_pdrop = settings.embd_pdrop = settings.attn_pdrop = 0.0
    return GPT2LMHeadModel(settings)


def counting(samples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards from anywhere; after the last word comes the first."""
    starts = torch.randint(WORDS, (samples, 1), generator=torch.Generator().manual_seed(seed))
    rows = (starts + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in rows]


def train(
    peers: list[str],
    seed: int,
    epochs: int | None = None,
    batches: int | None = None,
    host: str = "127.0.0.1",
    say: Say = print,
) -> str:
    """Trains until the run is at `epochs`, or for so many batches. Returns a digest of the parameters."""
    with swarmcli.DHT(peers, start=True, host=host) as dht, tempfile.TemporaryDirectory() as place:
        model = small_model()
        optimizer = make_optimizer(dht, model)
        invite(dht, say)
        tell_epochs(dht, say)
        trainer = make_trainer(model, counting(256, seed), optimizer, seed, place, epochs)
        if batches is not None:
            trainer.args.max_steps = -(-batches // ACCUMULATE)
        try:
            trainer.train()
            optimizer.linger(optimizer.local_epoch, 10.0)  # for peers that missed the last round
            return optimizer.state_digest()
        finally:
            optimizer.shutdown()


if __name__ == "__main__":
    given = arguments(__doc__)
    run(lambda: print("parameters", train(given.peer, given.seed, batches=given.batches, host=given.host)))
