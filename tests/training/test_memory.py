from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from swarmcli.errors import RecipeError
from swarmcli.optim.config import Role
from swarmcli.recipe import Limits, Recipe, parse_recipe
from swarmcli.training import Compute, build_task, memory
from swarmcli.training.memory import Room, activation_bytes, cgroup_limits, check_memory, memory_needs
from tests.training.small_tasks import saved_bytes, small

CPU, CUDA = Compute(torch.device("cpu")), Compute(torch.device("cuda", 0))
HUGE = ("base_model={model_type: gpt2, n_layer: 96, n_embd: 12288, n_head: 96}", "sequence_len=2048")  # GPT-3
MIB, GIB = 1 << 20, 1 << 30


def needs(recipe: object, role: Role = "trainer", compute: Compute = CPU) -> dict[str, int]:
    outline = build_task(recipe).build_model(outline=True)  # type: ignore[arg-type]
    return {need.what: need.nbytes for need in memory_needs(recipe, outline, role, compute)}  # type: ignore[arg-type]


def check(recipe: Recipe, role: Role = "trainer", compute: Compute = CPU, **options: Any) -> str:
    return check_memory(recipe, build_task(recipe).build_model(outline=True), role, compute, **options)


def test_a_model_that_cannot_fit_is_refused_with_the_sum_and_takes_nothing(tmp_path: Path) -> None:
    recipe = small(tmp_path, *HUGE)
    check(small(tmp_path))  # loads the libraries
    before = psutil.Process().memory_info().rss
    outline = build_task(recipe).build_model(outline=True)
    for role in ("trainer", "monitor", "auxiliary"):
        needed = rf"--set base_model=.*: base_model: as a {role} it needs about [0-9.]+ [GT]B of this machine"
        with pytest.raises(RecipeError, match=rf"{needed}(.|\n)*local\.check_memory: false") as refusal:
            check_memory(recipe, outline, role, CPU)  # type: ignore[arg-type]
        if role == "trainer":
            assert re.search(r"^ +69\d GB  parameters$", str(refusal.value), re.M)
            assert re.search(r"^ +1\.4 TB  statistics of adamw$", str(refusal.value), re.M)
    assert psutil.Process().memory_info().rss - before < 64 * MIB
    trying = small(tmp_path, *HUGE, "local.check_memory=false")  # who knows better may
    assert " TB of the " in check_memory(trying, outline, "trainer", CPU)


def test_what_is_free_counts_when_joining_and_what_there_is_when_validating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_room", lambda: Room(memory.HOST, 1 << 40, 1 << 20))
    assert check(small(tmp_path), now=False) == "567 MB of the 1.1 TB of this machine's memory"
    with pytest.raises(RecipeError, match=r"about 567 MB of this machine's memory, which has 1\.1 TB, 1\.0 MB of"):
        check(small(tmp_path))


def test_a_device_has_memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_room", lambda: Room(memory.HOST, 64 * GIB, 64 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 8 * GIB))
    gpt2 = "base_model={model_type: gpt2, n_layer: 24, n_embd: 1024, n_head: 16}"  # 300 million parameters
    with pytest.raises(RecipeError, match=r"of the memory of cuda:0, which has 8\.6 GB, 6\.4 GB of them") as full:
        check(small(tmp_path, gpt2), compute=CUDA)
    assert "statistics of adamw" in str(full.value) and "a copy of the state" not in str(full.value)
    told = check(small(tmp_path, gpt2, "local.offload_optimizer=true"), compute=CUDA)
    assert re.fullmatch(r".* GB of the 69 GB of this machine's memory and .* of the 8.6 GB of .*cuda:0", told)


def test_the_lines_follow_how_the_run_trains(tmp_path: Path) -> None:
    def units(*overrides: str, role: Role = "trainer") -> dict[str, float]:
        # Short, since older versions of transformers keep a mask of positions by positions beside the parameters.
        size = ("base_model.n_embd=256", "base_model.n_layer=4", "base_model.n_positions=64")
        found, model = needs(small(tmp_path, *size, *overrides), role), needs(small(tmp_path, *size))["parameters"]
        shares = {what.split()[0]: nbytes / model for what, nbytes in found.items()}
        return {what: round(share) for what, share in shares.items() if share == pytest.approx(round(share), rel=0.005)}

    plain = {"parameters": 1, "gradients": 1, "sums": 1, "mean": 1, "averages": 1}
    assert units("optimizer.name=sgd") == plain | {"a": 1}
    assert units() == plain | {"statistics": 2, "a": 3}
    assert units("ema_decay=0.9") == plain | {"statistics": 3, "a": 4}
    zero = units("local.site.processes=2", "local.site.zero=true")
    assert (zero["statistics"], zero["a"]) == (2, 4), "half of it, twice; also in a copy of the state"
    assert units("local_updates.enabled=true") == {
        "parameters": 1, "gradients": 1, "statistics": 2, "the": 2, "mean": 1, "averages": 1, "a": 3,
    }  # fmt: skip
    outer = "outer={optimizer: nesterov, inner_batch_size: 8}"
    assert units(outer) == plain | {"statistics": 1, "the": 2, "a": 2}  # of the two optimizers' lines the last one
    assert "sums" not in units(outer, "micro_batch_size=8")
    assert units("ema_decay=0.9", outer, role="monitor") == {
        "parameters": 1, "mean": 1, "averages": 1, "the": 2, "statistics": 2, "a": 3, "copies": 5,
    }  # fmt: skip
    assert units(role="auxiliary") == {"averages": 1}
    sparse = units("averaging.trust=members", "gradient_averaging.method=topk", "optimizer.name=sgd")
    assert sparse == plain | {"a": 1, "residuals": 1, "messages": 1}
    thin = [f"gradient_averaging.{each}" for each in ("method=powersgd", "rank=8")]
    assert units(*thin, role="auxiliary") == {}  # a part of it
    assert units(role="monitor") == {"parameters": 1, "sums": 1, "mean": 1, "averages": 1, "statistics": 2, "a": 3,
                                     "copies": 5}  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        "{model_type: gpt2, n_layer: 2, n_embd: 64, n_head: 4}",
        "{model_type: gpt2, n_layer: 2, n_embd: 64, n_head: 4, attn_pdrop: 0, resid_pdrop: 0, embd_pdrop: 0}",
        "{model_type: llama, num_hidden_layers: 2, hidden_size: 64, intermediate_size: 172, num_attention_heads: 4}",
    ],
)
@pytest.mark.parametrize("sequence_len", [32, 128])
def test_what_a_forward_pass_keeps_is_told_roughly(tmp_path: Path, model: str, sequence_len: int) -> None:
    recipe = small(tmp_path, f"base_model={model}", f"sequence_len={sequence_len}")
    task = build_task(recipe)
    built = task.build_model()
    kept = saved_bytes(built, lambda: task.loss(built, {"input_ids": torch.zeros(2, sequence_len, dtype=torch.long)}))
    assert 0.8 < activation_bytes(recipe, built, CPU) / kept < 2


def test_what_a_pass_over_images_keeps_is_told_roughly(tmp_path: Path) -> None:
    sizes = "image_size: 64, patch_size: 8, hidden_size: 96, num_hidden_layers: 3, num_attention_heads: 4"
    recipe = parse_recipe(
        "run_id: images\ntask: image_classification\nlabels: [a, b]\ntarget_batch_size: 8\nmicro_batch_size: 2\n"
        f"datasets: [{{path: imagefolder, data_files: ['x/**']}}]\n"
        f"base_model: {{model_type: vit, intermediate_size: 384, {sizes}}}\n"
    )
    task = build_task(recipe)
    built = task.build_model()
    batch = {"pixel_values": torch.zeros(2, 3, 64, 64), "labels": torch.zeros(2, dtype=torch.long)}
    assert 0.8 < activation_bytes(recipe, built, CPU) / saved_bytes(built, lambda: task.loss(built, batch)) < 2


def test_words_count_beside_an_adapter_as_without(tmp_path: Path) -> None:
    def of_words(*overrides: str) -> int:
        few, many = (small(tmp_path, f"base_model.vocab_size={size}", *overrides) for size in (300, 50300))
        more, less = (activation_bytes(each, build_task(each).build_model(outline=True), CPU) for each in (many, few))
        return more - less

    assert of_words("adapter=lora") == of_words() > 0


def test_control_groups_limit_a_machine(tmp_path: Path) -> None:
    def group(path: str, **files: object) -> None:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (tmp_path / path / name.replace("__", ".")).write_text(f"{value}\n")

    group("a/b", memory__max="max", memory__current=5, memory__stat="anon 5")
    group("a", memory__max=100, memory__current=70, memory__stat="anon 30\ninactive_file 40")
    group("memory/c", memory__limit_in_bytes=50, memory__usage_in_bytes=20, memory__stat="total_inactive_file 7")
    (tmp_path / "groups").write_text("9:name=systemd:/x\n4:memory:/c\n1:cpu:/\n0::/a/b\n")
    assert list(cgroup_limits(tmp_path / "groups", tmp_path)) == [(50, 37), (100, 70)]
    (tmp_path / "groups").write_text("0::/the/hosts/name/of/it\n")
    assert list(cgroup_limits(tmp_path / "groups", tmp_path / "a")) == [(100, 70)]
    assert list(cgroup_limits(tmp_path / "none", tmp_path)) == []


def test_what_is_lent_is_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_room", lambda: Room(memory.HOST, 64 * GIB, 64 * GIB, 3 * GIB))
    with pytest.raises(RecipeError, match="of which you lend 300 MB"):
        check(small(tmp_path), limits=Limits(memory=300e6), now=False)
    with pytest.raises(RecipeError, match=r"you lend 3\.4 GB, and your other peers take 3\.2 GB .*memory="):
        check(small(tmp_path), limits=Limits(memory=0.05))
    assert check(small(tmp_path), limits=Limits(memory=0.5))
