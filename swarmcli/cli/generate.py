"""`swarm generate`: see what a run has learned."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmcli.checkpoints.layout import (
    ADAPTER_CONFIG,
    BEST,
    CONFIG,
    LATEST,
    MANIFEST,
    MODEL,
    averaged_file,
    check_files,
    find_checkpoint,
    read_manifest,
)
from swarmcli.checkpoints.looking import CheckpointInfo
from swarmcli.cli.checkpoints import NONE_HERE, looked_for
from swarmcli.cli.local import Json, LastEpoch, Quiet
from swarmcli.errors import CheckpointError, UsageError
from swarmcli.words import first_words, harmless, printable


@dataclass(frozen=True, slots=True)
class Generation:
    prompt: str
    tokens: int
    temperature: float  # 0: always the likeliest token
    seed: int | None
    end: str = ""  # the text ends before this mark
    whole: bool = False  # whether the prompt has its special tokens already


def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT] PROMPT",
            help="The text to go on from, or what you say to a model that has learned from conversations; before it a "
            "checkpoint, a directory that holds some, a run id, latest or best. Default: the latest of your runs.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="How many tokens at most.")] = 100,
    temperature: Annotated[
        float,
        typer.Option("--temperature", "-t", min=0.0, max=10.0, help="How daring: at 0 always the likeliest token."),
    ] = 0.8,
    seed: Annotated[int | None, typer.Option(min=0, help="The same number gives the same text.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask you for line after line; so it does on a terminal without a PROMPT.")
    ] = False,
    system: Annotated[str, typer.Option(help="What the model is told before the first turn.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the text as it is, also where the model has a chat template.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The saved model beside which an adapter was trained. Default: as its peer had it."
        ),
    ] = None,
    last_epoch: LastEpoch = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Have a checkpoint's model continue a text: see what a run has learned.

    A model with a chat template is asked and answers; any other one goes on from the text.

    \b
    swarm generate "def main("                    by the latest checkpoint of your runs
    swarm generate best "def main(" -t 0          by the best, always the likeliest
    swarm generate stdlib-lm "import " -n 200     by the latest of a run
    swarm generate --chat my-run                  line after line, until Ctrl-D
    """
    given = list(words or ())
    chat = chat or (not given and sys.stdin.isatty())
    if chat and as_json:
        raise UsageError("--json tells of one prompt; leave out --chat, and give one")
    if not chat and not given:
        raise UsageError("there is no prompt; give one, or --chat to type line after line")
    if len(given) > 2 - chat:
        raise UsageError('a checkpoint and a prompt, no more: put the prompt in quotes, swarm generate "def main("')
    path = checkpoint_named(given[0] if len(given) == 2 - chat else LATEST)
    if not (as_json or quiet):
        typer.echo(printable(f"by {path}", 2000), err=True)
    model, tokenizer = load(path, base, last_epoch=last_epoch)
    conversation = Conversation(tokenizer, system, raw=raw)

    def show(text: str) -> None:
        # A model may have learned to write control sequences of terminals. A pipe gets the text as it is.
        if sys.stdout.isatty():
            text = "".join(each if each == "\n" else harmless(each) for each in text)
        sys.stdout.write(text)
        sys.stdout.flush()

    for said in _lines() if chat else given[-1:]:
        if not (as_json or conversation.takes_turns):
            show(said)
        how = Generation(
            conversation.prompt(said),
            tokens,
            temperature,
            seed,
            conversation.end_of_turn,
            whole=conversation.takes_turns,
        )
        text, count = write_on(model, tokenizer, how, (lambda piece: None) if as_json else show)
        conversation.answered(text)
        if as_json:
            typer.echo(json.dumps({"checkpoint": str(path), "prompt": said, "text": text, "tokens": count}))
        else:
            typer.echo()


def _lines() -> Iterator[str]:
    """Yields the lines that a person types, until the end of the input."""
    with suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")
    typer.echo()  # a new line after Ctrl-D


class Conversation:
    """The turns of a person and a model, as the tokenizer's chat template writes them; without a template, or with
    `raw`, each text stands for itself. Raises UsageError if the template refuses what was said."""

    def __init__(self, tokenizer: Any, system: str, *, raw: bool) -> None:
        self.takes_turns = bool(tokenizer.chat_template) and not raw
        if system and not self.takes_turns:
            raise UsageError("--system is for models with a chat template; put it into the prompt, or leave out --raw")
        self.end_of_turn = ""  # what a model writes at the end of its turn
        self._tokenizer = tokenizer
        self._messages = [{"role": "system", "content": system}] if system else []
        if self.takes_turns:
            probe = [*self._messages, {"role": "user", "content": "?"}, {"role": "assistant", "content": "swarm!"}]
            after = self._rendered(probe).rpartition("swarm!")[2]
            self.end_of_turn = next(iter(after.split(maxsplit=1)), "")

    def prompt(self, said: str) -> str:
        """Returns the text from which the model goes on."""
        if not self.takes_turns:
            return said
        self._messages.append({"role": "user", "content": said})
        return self._rendered(self._messages, add_generation_prompt=True)

    def answered(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})

    def _rendered(self, messages: list[dict[str, str]], **options: Any) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # whatever a template meets in a conversation that it was not written for
            raise UsageError(
                f"the model's chat template refuses it: {first_words(error)}; --raw goes on from plain text"
            ) from error


def checkpoint_named(word: str) -> Path:
    """Returns the directory of the model that a person names. Raises CheckpointError."""
    path = Path(word)
    if path.exists() and path.suffix not in (".yaml", ".yml"):
        if (path / CONFIG).is_file() and not (path / MANIFEST).is_file() and path.name not in (LATEST, BEST):
            return path  # a model of transformers, perhaps downloaded from the Hub
        return find_checkpoint(path)
    found = looked_for(None if word in (LATEST, BEST) else word)
    if not found:
        raise CheckpointError(NONE_HERE)
    return _best(found) if word == BEST else max(found, key=lambda info: info.written).path


def _best(found: list[CheckpointInfo]) -> Path:
    """Returns the best of the run that wrote last: losses of different runs cannot be compared."""
    run_id = max(found, key=lambda info: info.written).run_id
    measured = [(info.loss, info.path) for info in found if info.run_id == run_id and info.loss is not None]
    if not measured:
        raise CheckpointError(
            f"no checkpoint of {run_id} was evaluated, so none is best; take latest, or set evaluation.every_epochs "
            "in the recipe"
        )
    return min(measured)[1]


def load(path: Path, base: Path | None = None, *, last_epoch: bool = False) -> tuple[Any, Any]:
    """Returns model and tokenizer, from these files alone; with weights averaged over epochs, if there are some, unless
    `last_epoch`. Raises CheckpointError for a checkpoint that is damaged, or holds another kind of model."""
    if (path / MANIFEST).is_file():
        check_files(path, read_manifest(path))
    kind = _architecture(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from swarmcli.training.adapters import load_quietly
    from swarmcli.training.merging import base_of, load_adapted

    logging.set_verbosity_error()
    options = {"local_files_only": True, "trust_remote_code": False}
    model: Any = (
        load_adapted(path, base_of(path, base), last_epoch=last_epoch) if (path / ADAPTER_CONFIG).is_file() else None
    )
    try:
        if model is None:
            variant = None if last_epoch or not (path / averaged_file(MODEL)).is_file() else "ema"
            model = load_quietly(AutoModelForCausalLM, str(path), use_safetensors=True, variant=variant, **options)
    except Exception as error:  # architectures raise whatever their constructors meet
        raise CheckpointError(
            f"{path} holds a {kind}, which does not load as a model that writes on: {first_words(error)}; "
            "its README.md shows how to use it, or take a checkpoint of a run with task: causal_lm"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), **options)
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise CheckpointError(
            f"{path} has a model, and no tokenizer that can be read: {first_words(error)}; use another checkpoint"
        ) from error
    return model.eval(), tokenizer


def _architecture(path: Path) -> str:
    """Reads from its config what the model is. Raises CheckpointError if it does not write text."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        named = [str(each) for each in config.get("architectures") or []]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} holds no model of transformers (it has no {CONFIG}), so nothing here knows how it writes"
        ) from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / CONFIG} cannot be read: {error}; use another checkpoint") from error
    if named and not any(each.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for each in named):
        raise CheckpointError(
            f"{path} holds a {printable(named[0], 100)}, which does not write text; its README.md shows how to use it, "
            "or take a checkpoint of a run with task: causal_lm"
        )
    return printable(named[0], 100) if named else "model of another kind"


def write_on(model: Any, tokenizer: Any, how: Generation, show: Callable[[str], object]) -> tuple[str, int]:
    """Returns the text after the prompt, and its number of tokens; passes it to `show` piece by piece.

    A model reads a bounded number of tokens: of a longer prompt only the end counts, and the model writes until the
    bound is reached.
    """
    import torch
    from transformers import TextStreamer

    from swarmcli.training.tokenizer import SavedTokenizer

    def cut(text: str) -> str:
        return text.partition(how.end)[0] if how.end else text

    class Pieces(TextStreamer):  # TextStreamer gives whole words, and the end mark is one
        written = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            shown = cut(self.written)
            self.written += text
            show(cut(self.written)[len(shown) :])

    # As in training: without what the tokenizer puts after a text; and a text that begins follows the end of another.
    trained = SavedTokenizer(tokenizer)
    known = [*(() if how.whole else trained.before), *trained.encode(how.prompt).tolist()] or trained.behind[-1:]
    if not known:
        raise UsageError("the prompt is empty, and this model knows no token to begin with; give it some text")
    ids = torch.tensor([known])
    most = getattr(model.config, "max_position_embeddings", None) or ids.shape[1] + how.tokens
    ids = ids[:, -max(1, most - how.tokens, most // 2) :]
    count = max(1, min(how.tokens, most - ids.shape[1]))
    sampling = {"do_sample": True, "temperature": how.temperature} if how.temperature > 0 else {"do_sample": False}
    if how.seed is not None:
        torch.manual_seed(how.seed)
    with torch.no_grad():
        written = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            streamer=Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **({"stop_strings": [how.end], "tokenizer": tokenizer} if how.end else {}),
            **sampling,
        )[0, ids.shape[1] :]
    return cut(str(tokenizer.decode(written, skip_special_tokens=True))), len(written)
