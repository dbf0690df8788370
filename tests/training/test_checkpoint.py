from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from swarmcli.checkpoints import layout
from swarmcli.checkpoints.directory import Keep, loss_of
from swarmcli.checkpoints.layout import find_checkpoint
from swarmcli.checkpoints.looking import verify
from swarmcli.errors import CheckpointError
from swarmcli.events import CheckpointWritten, Event, Events, Noticed
from swarmcli.training import CheckpointStore, build_scheduler, build_task, load_checkpoint
from swarmcli.training.model_card import describe_model
from swarmcli.training.resumed import by_recipe
from swarmcli.training.schedule import averages_in

from .small_tasks import build_optimizer, save_word_tokenizer, small


class Run:
    """A model and optimizer that were trained a little, and their checkpoints."""

    def __init__(self, directory: Path, *overrides: str, keep: int = 3, steps: int = 2) -> None:
        recipe = small(directory, *overrides)
        task = build_task(recipe)
        self.model: Any = task.build_model()
        self.optimizer = build_optimizer(recipe, self.model)
        self.scheduler = build_scheduler(recipe, self.optimizer)
        self.happened: list[Event] = []
        events = Events()
        events.subscribe(self.happened.append)
        self.store = CheckpointStore(directory / "checkpoints", recipe.run_id, keep=Keep(keep), events=events)
        stream = task.batches(0)
        for _ in range(steps):
            task.loss(self.model, next(stream)).backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        """What OptimizerCore.state_dict() looks like."""
        swarm = {"epoch": 7, "lineage": "ab" * 32, "scheduler": self.scheduler.state_dict()}
        return {**self.optimizer.state_dict(), "swarm": swarm}

    def write(self, epoch: int) -> Path:
        path = self.store.write(self.model, self.state(), epoch)
        assert path is not None
        return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_everything_comes_back_bit_by_bit(tmp_path: Path, run: Run) -> None:
    checkpoint = load_checkpoint(run.write(7), "small")
    assert (checkpoint.epoch, checkpoint.run_id) == (7, "small")
    other = Run(tmp_path, "seed=5", steps=0)
    checkpoint.restore_model(other.model)
    assert "lm_head.weight" not in checkpoint.model, "tied weights are saved once, and stay tied"
    assert other.model.lm_head.weight is other.model.transformer.wte.weight
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], tensor), name
    swarm = checkpoint.optimizer.pop("swarm")
    assert swarm == run.state()["swarm"]
    other.optimizer.load_state_dict(checkpoint.optimizer)
    expected, found = run.optimizer.state_dict(), other.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for index, statistics in expected["state"].items():
        for name, value in statistics.items():
            assert torch.equal(found["state"][index][name], value)


@pytest.mark.parametrize("from_directory", [False, True])
def test_transformers_loads_a_checkpoint_with_its_tokenizer(tmp_path: Path, from_directory: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    overrides: list[str] = []
    if from_directory:
        save_word_tokenizer(tmp_path / "begin")
        build_task(small(tmp_path, "tokenizer=begin")).build_model().bfloat16().save_pretrained(tmp_path / "begin")  # type: ignore[operator]
        overrides = ["tokenizer=begin", "base_model=begin"]
    recipe = small(tmp_path, *overrides)
    task = build_task(recipe)
    written = task.build_model()
    store = CheckpointStore(
        tmp_path / "checkpoints", "small", describe=lambda *to: describe_model(to[0], recipe, task, *to[1:], trainers=2)
    )
    assert store.write(written, {"swarm": {"samples_seen": 56}}, 7) is not None
    latest = str(store.directory / "latest")
    model: Any = AutoModelForCausalLM.from_pretrained(latest, local_files_only=True, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(latest, local_files_only=True, trust_remote_code=False)
    for name, parameter in written.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    text = "the swarm" if from_directory else "häl\0lo <|end_of_text|> 𝄞"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == text
    assert model.config.use_cache and model.generate(ids[:, :8], max_new_tokens=4).shape[1] > 8 - 6 * from_directory
    for file in Path(latest).glob("*"):
        assert file.suffix == ".safetensors" or str(tmp_path) not in file.read_text(), file
    assert "- samples: 56," in Path(latest, "README.md").read_text()
    again = build_task(small(tmp_path, "base_model=checkpoints/latest", "tokenizer=checkpoints/latest"))
    assert torch.equal(next(again.build_model().parameters()), next(written.parameters()))


def test_an_event_tells_of_it_and_the_same_epoch_again_replaces_it(tmp_path: Path, run: Run) -> None:
    path = run.write(3)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert run.happened == [CheckpointWritten(3, str(path), size)]
    with torch.no_grad():
        next(run.model.parameters()).fill_(0.5)
    checkpoint = load_checkpoint(run.write(3))
    assert (checkpoint.model["transformer.wte.weight"] == 0.5).all()
    assert {path.name for path in run.store.directory.iterdir()} == {"epoch-000003", "latest"}


def test_a_full_disk_is_a_warning_and_leaves_nothing_half(run: Run) -> None:
    """A limit on file sizes makes the library's own write fail, as a full disk would."""
    import resource
    import signal

    run.write(1)
    there = sorted(run.store.directory.rglob("*"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        for epoch in (2, 4):
            assert run.store.write(run.model, run.state(), epoch) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    (notice,) = (event for event in run.happened if isinstance(event, Noticed))  # the disk is full: told once
    assert notice.level == "warning" and "checkpoint of epoch 2" in notice.text
    assert sorted(run.store.directory.rglob("*")) == there
    run.write(3)


@pytest.mark.parametrize("name", [layout.MODEL, layout.TRAINING, layout.CONFIG])
def test_a_damaged_file_is_named(run: Run, name: str) -> None:
    path = run.write(3)
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: its content is not what was written; use an older"):
        load_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load_checkpoint(path)


def edit(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / layout.MANIFEST).read_text()) | changes
    del manifest[layout.DIGEST]  # as earlier versions wrote it
    (path / layout.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 99}, "of another format"),
        ({"epoch": None}, "epoch is missing"),
        ({"sha256": {}}, "does not list its files"),
        ({"optimizer": {"$tensor": "no such"}}, "is damaged"),
    ],
)
def test_a_damaged_manifest_is_named(run: Run, changes: dict[str, Any], words: str) -> None:
    path = run.write(3)
    edit(path, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(path)


def test_no_flipped_bit_of_the_manifest_changes_what_is_read(run: Run) -> None:
    path = run.write(3)
    whole, data = layout.read_manifest(path), (path / layout.MANIFEST).read_bytes()
    noticed = 0
    for place in range(0, len(data), 7):
        harmed = bytearray(data)
        harmed[place] ^= 1
        (path / layout.MANIFEST).write_bytes(harmed)
        try:
            assert layout.read_manifest(path).items() >= whole.items()  # the name of the digest was harmed
        except CheckpointError as error:
            assert str(path) in str(error)
            noticed += 1
    assert noticed >= len(range(0, len(data), 7)) - 1


def test_what_is_no_checkpoint_or_of_another_run_is_named(tmp_path: Path, run: Run) -> None:
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no checkpoint\.json"):
        load_checkpoint(tmp_path)
    path = run.write(3)
    with pytest.raises(CheckpointError, match="belongs to the run 'small', not to 'other'"):
        load_checkpoint(path, "other")
    (path / layout.MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path, run: Run) -> None:
    checkpoint = load_checkpoint(run.write(3))
    wider = r"is torch.float32 \(259, 16\) there, .* \(259, 32\) here"
    for override, words in (("base_model.n_embd=32", wider), ("base_model.n_layer=2", "is only here")):
        model = build_task(small(tmp_path, override)).build_model()
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match=words):
            checkpoint.restore_model(model)
        assert all(map(torch.equal, before, model.parameters()))


def test_models_that_are_not_of_transformers_have_no_config(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "plain")
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    path = store.write(model, {}, 1)
    assert path is not None and not (path / layout.CONFIG).exists()
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    load_checkpoint(path).restore_model(other)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


KEPT = Path(__file__).parents[1] / "kept" / "checkpoints" / "checkpoint.tar.xz"  # made by the build 26d1bc3: make.sh
EARLIER = (
    "run_id=old",
    "base_model={model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 4, tie_word_embeddings: true}",
    "sequence_len=8",
    "ema_decay=0.9",
    "optimizer={learning_rate: 0.02}",
)


def test_a_checkpoint_of_an_earlier_build_is_read_and_training_goes_on_from_it(tmp_path: Path) -> None:
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    place = find_checkpoint(tmp_path)
    assert verify(place) == "" and loss_of(place) == pytest.approx(5.514657, abs=1e-6)
    checkpoint, recipe = load_checkpoint(place, "old"), small(tmp_path, *EARLIER)
    model = build_task(recipe).build_model()
    checkpoint.restore_model(model)
    optimizer = build_optimizer(recipe, model)
    build_scheduler(recipe, optimizer)
    state, differences = by_recipe(recipe, checkpoint, optimizer.param_groups)
    assert differences.startswith("learning_rate 0.02 (0.01 in the checkpoint)")
    assert layout.position_of(place, "old")[:2] == (3, 96) == (state["swarm"]["epoch"], state["swarm"]["samples_seen"])
    del state["swarm"]
    optimizer.load_state_dict(state)
    assert {int(each["step"]) for each in optimizer.state.values()} == {3}
    weights, averaged = (load_file(place / name) for name in (layout.MODEL, layout.averaged_file(layout.MODEL)))
    for parameter, average in averages_in(recipe, model, optimizer.state_dict()):
        name = next(name for name, each in model.named_parameters() if each is parameter)
        assert torch.equal(weights[name], parameter) and torch.equal(averaged[name], average)
