"""Frozen weights, which nobody trains: equal at all peers, a download of their own, no part of states."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.dht import DHT
from swarmcli.errors import FingerprintError, StateDownloadError
from swarmcli.events import Noticed, PeerRefused, StateDonated, StateDownloaded
from swarmcli.optim import Optimizer
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription, Role
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import Timing, Trained
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.peers import frozen_exchange
from swarmcli.optim.state.frozen import FILE, TERM, FrozenWeights, base_of, frozen_of
from swarmcli.optim.state.replica import Offloaded
from swarmcli.state import snapshot as snapshot_module
from swarmcli.state.snapshot import Snapshot
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, record, together
from tests.optim.shells import dhts
from tests.simulation import within

TARGET, WIDTH, WORDS = 24, 8, 512


class Model(torch.nn.Module):
    """A frozen table, and a layer that is trained."""

    def __init__(self, seed: int = 0, frozen: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(frozen)
        table = torch.randn(WIDTH, WORDS, generator=generator).T  # not contiguous
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.scale = torch.nn.Parameter(torch.rand((), generator=generator).bfloat16(), requires_grad=False)
        self.tied = self.table
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(WIDTH, 2)
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.table[words] * self.scale.float() * self.mask)
        return found


class Peer:
    """A trainer."""

    def __init__(
        self,
        node: Any,
        *,
        seed: int = 0,
        frozen: int = 0,
        digest: str = "",
        directory: Path | None = None,
        mode: Mode | None = None,
        role: Role = "trainer",
        named: bool = True,
        **options: Any,
    ) -> None:
        """`named`: it says which weights are frozen and its optimizer has all, and does not leave that to be found."""
        self.node, self.model, mode = node, Model(seed, frozen), mode or Mode()
        params = [each for each in self.model.parameters() if named or each.requires_grad]
        place = Offloaded(params, lambda copies: torch.optim.SGD(copies, lr=0.1))
        if mode.timing is Timing.AT_ONCE:
            optimizer, place = torch.optim.SGD(params, lr=0.1), None
        else:
            optimizer = place.optimizer
        weights = frozen_of(params, self.model.named_parameters() if named else (), digest, directory)
        weights.base = "" if weights.digest else base_of(params)
        fingerprint = {TERM: weights.digest} if weights.digest else {}
        config = OptimizerConfig("run", TARGET, description=PeerDescription(role), fingerprint=fingerprint, **options)
        trained = Trained(optimizer, extra_tensors=[self.model.mask], placement=place, frozen=weights)
        self.core = OptimizerCore(PeerContext(node, config, averager_config(config)), trained, mode)
        self.frozen = weights
        self.data = torch.Generator().manual_seed(int.from_bytes(node.peer_id[:4]))
        self.noticed, self.refused = record(node, Noticed), record(node, PeerRefused)

    async def compute(self, size: int = 4) -> bool:
        await asyncio.sleep(0.1)
        words = torch.randint(WORDS, (size,), generator=self.data)
        self.model.zero_grad()
        torch.nn.functional.cross_entropy(self.model(words), words % 2).backward()
        return await self.core.step(size)

    async def train(self, until: int) -> None:
        while self.core.position.epoch < until:
            await self.compute()

    async def follow(self, until: int) -> None:
        while self.core.position.epoch < until:
            await self.core.step(0)

    @property
    def names(self) -> set[str]:
        return set(self.core.replica.state.capture().tensors)


class Peers(Swarm):
    async def peer(self, **options: Any) -> Peer:
        return await self.add(Peer(await self.node(), **options))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_MIN_CHUNK", 512)


def whole(peer: Peer, like: Peer) -> bool:
    """Whether its model computes with the frozen weights of another one."""
    pairs = zip(peer.model.parameters(), like.model.parameters(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs if not one.requires_grad)


@within(300)
async def test_they_are_no_part_of_states_rounds_and_lineages() -> None:
    async with Peers() as swarm:
        one = await swarm.peer()
        first = one.core.position
        await one.train(2)
        two = await swarm.peer(seed=1)
        downloads = record(two.node, StateDownloaded)
        await two.core.join()
        await together(one.train(4), two.train(4))
        assert one.core.replica.state.digest() == two.core.replica.state.digest()
        numbers = one.model.layer.weight.nbytes + one.model.layer.bias.nbytes
        assert downloads[0].bytes < numbers + 512, "the table is 16 KiB"
        assert len([name for name in one.names if name.startswith("parameter/")]) == 2
        assert one.core.work.averager.layout.wire_bytes < 2 * numbers
        other = await swarm.peer(frozen=1)
        assert other.core.position == first


@pytest.mark.parametrize(
    ("role", "timing", "in_memory"), [("trainer", Timing.AT_ONCE, 0), ("monitor", Timing.DELAYED_STEP, 64 << 20)]
)
@within(300)
async def test_a_newcomer_with_others_downloads_the_runs_once(
    role: Role, timing: Timing, in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_exchange, "IN_MEMORY", in_memory)
    async with Peers() as swarm:
        mode = Mode(timing=timing)
        one = await swarm.peer(mode=mode)
        await one.train(1)
        two = await swarm.peer(frozen=1, seed=1, digest=one.frozen.digest, directory=tmp_path, mode=mode, role=role)
        assert not two.frozen.held and not whole(two, one)
        version = two.model.table._version
        given = record(one.node, StateDonated)
        await together(one.train(5), two.follow(5) if role == "monitor" else two.train(5))
        assert whole(two, one) and two.frozen.held and (tmp_path / FILE).exists()
        assert one.core.replica.state.digest() == two.core.replica.state.digest()
        assert two.model.table._version > version, "by that rank 0 of a site knows what the others need"
        assert len(given) == 1, "of the state; its chunks hold no frozen weights"
        assert [each.level for each in two.noticed if "frozen weights" in each.text] == ["info"]
        again = FrozenWeights(Peer(two.node, frozen=2).frozen.tensors, one.frozen.digest, tmp_path)
        assert again.held, "a restart downloads nothing"


def test_a_base_that_nobody_has_named_is_compared_whatever_holds_it() -> None:
    """A newcomer to two at work with another one is refused; a wrapped model, and one in bfloat16, are the same."""

    async def main() -> None:
        async with Peers() as swarm:
            one, two = [await swarm.peer(named=False) for _ in range(2)]
            await together(one.train(2), two.train(2))
            other = await swarm.peer(frozen=1, named=False)

            async def refused() -> None:
                with pytest.raises(FingerprintError, match=r"frozen_parameters=\(\)"):
                    await other.train(8)

            await together(one.train(4), two.train(4), refused())
            assert one.core.replica.state.digest() == two.core.replica.state.digest()

    virtual_time.run(main(), timeout=600)
    base, trained = base_of(list((model := Model()).layer.parameters())), list(model.layer.parameters())
    wrapped = torch.nn.Sequential(model, torch.nn.Identity())
    model.table.data, model.scale.data = model.table.bfloat16(), model.scale.float()
    assert len(base) == 64 and base_of(trained) == base and len(wrapped) == 2
    assert base_of(list(torch.nn.Linear(2, 2).parameters())) == ""


@within(300)
async def test_strangers_drive_nobody_away_that_was_told_the_digest_or_has_nothing_frozen() -> None:
    async with Peers() as swarm:
        stranger = await swarm.peer(frozen=1)
        await stranger.train(1)
        named = await swarm.peer(digest=frozen_of([], Model().named_parameters()).digest)
        plain = await swarm.trainer(fingerprint={"seed": "other"})
        await named.train(2)
        await plain.train(2)
        assert (
            whole(named, Peer(named.node)) and named.core.replica.state.digest() != stranger.core.replica.state.digest()
        )


def lie(peer: Peer, *, hashes: bool) -> None:
    """Makes the peer give out other bytes, or name other hashes, under the run's digest."""

    async def provide(version: bytes) -> Snapshot:
        true = peer.frozen.snapshot()
        tensors = {name: tensor.clone() for name, tensor in true.tensors.items()}
        tensors["table"][300] += 1
        return Snapshot(version, None, tensors, digests=() if hashes else true.digests)

    peer.core.frozen.donor._pins._provide = provide


@pytest.mark.parametrize("hashes", [False, True], ids=["other bytes", "other hashes"])
@within(300)
async def test_a_donor_that_gives_others_is_refused(hashes: bool) -> None:
    async with Peers() as swarm:
        one, two = [await swarm.peer() for _ in range(2)]
        await together(one.train(1), two.train(1))
        lie(one, hashes=hashes)
        newcomer = await swarm.peer(frozen=1, digest=two.frozen.digest)
        honest = two.core.frozen.donor
        honest._max_downloads = 0  # it has no time until somebody was refused
        newcomer.node.endpoint.events.subscribe(
            lambda event: isinstance(event, PeerRefused) and setattr(honest, "_max_downloads", 4)
        )
        await newcomer.core.join()
        assert whole(newcomer, two)
        assert {each.peer for each in newcomer.refused} == {one.node.peer_id.text}
        alone = await swarm.peer(frozen=1, digest=two.frozen.digest, load_state_timeout=5.0)
        for peer in (two, newcomer):
            peer.core.frozen.close()
        with pytest.raises(StateDownloadError, match="frozen weights"):
            await alone.core.join()
        assert torch.equal(alone.model.table, Model(frozen=1).table), "nothing changes before all of it is right"


@pytest.mark.parametrize("damage", ["truncated", "another value", "another run's", "another model's"])
def test_a_kept_file_that_is_torn_is_not_believed(damage: str, tmp_path: Path) -> None:
    run, file = frozen_of([], Model().named_parameters()), tmp_path / FILE
    kept = FrozenWeights(run.tensors if damage != "another run's" else Model(frozen=3).state_dict(), directory=tmp_path)
    kept.keep()
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-100])
    elif damage == "another value":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "another model's":
        FrozenWeights({"table": torch.zeros(3)}, directory=tmp_path).keep()
    other = Model(frozen=1)
    found = frozen_of([], other.named_parameters(), run.digest, tmp_path)
    assert not found.held and torch.equal(other.table, Model(frozen=1).table)
    FrozenWeights(run.tensors, directory=tmp_path).keep()
    assert frozen_of([], other.named_parameters(), run.digest, tmp_path).held
    assert torch.equal(other.table, Model().table)


def test_the_digest_is_of_names_types_shapes_and_values() -> None:
    tensors = {
        "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "number": torch.tensor(1.5),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }
    digest = FrozenWeights(tensors).digest
    assert digest == FrozenWeights(dict(reversed(tensors.items()))).digest, "whatever comes first in a model"
    strided = {**tensors, "half": tensors["half"].T.contiguous().T}
    assert not strided["half"].is_contiguous() and FrozenWeights(strided).digest == digest
    others = [
        {**tensors, "half": tensors["half"].view(3, 2)},
        {**tensors, "half": tensors["half"].half()},
        {**tensors, "number": torch.tensor(1.25)},
        {("Half" if name == "half" else name): tensor for name, tensor in tensors.items()},
    ]
    assert len({digest, *(FrozenWeights(each).digest for each in others)}) == 5
    assert FrozenWeights({}).digest == "" and FrozenWeights({}).held


def test_digests_stay_the_same_over_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests stand in recipes and scripts."""
    monkeypatch.undo()
    tensors = {"a": torch.arange(50_000, dtype=torch.float32), "b": torch.ones(3, 2, dtype=torch.bfloat16)}
    assert FrozenWeights(tensors).digest == "ea78033c01f25335b9a2ec07eb04dfad1a8615d3bb223106ddca151ae38db01c"


def test_tied_ones_are_one_and_trained_ones_are_passed_over() -> None:
    model = Model()
    found = frozen_of(list(model.parameters()), model.named_parameters(remove_duplicate=False))
    assert list(found.tensors) == ["scale", "table"]
    assert list(frozen_of(list(model.parameters())).tensors) == ["parameter/0", "parameter/1"]
    assert list(frozen_of([], model.parameters()).tensors) == ["0", "1"]


LAYER, BUFFER = torch.nn.Linear(2, 2), torch.zeros(3)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"digest": "abc"}, "64 hexadecimal digits"),
        ({"named": [], "digest": "0" * 64}, "no frozen weights"),
        ({"named": [("a", torch.zeros(1)), ("a", torch.ones(1))]}, "one name"),
        ({"named": ["a"]}, "expected tensors"),
        ({"parameters": list(LAYER.parameters()), "named": LAYER.state_dict().items()}, "'weight' is trained"),
        ({"named": [("mean", BUFFER)], "averaged": [BUFFER]}, "averaged as one of extra_tensors"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        frozen_of(**{"parameters": [], "named": [torch.zeros(2)], **wrong})


@within(300)
async def test_a_checkpoint_names_them() -> None:
    async with Peers() as swarm:
        one = await swarm.peer()
        await one.train(2)
        saved, weights = await one.core.state_dict(), {k: v.clone() for k, v in one.model.state_dict().items()}
        assert saved["swarm"][TERM] == one.frozen.digest

        again = await swarm.peer(frozen=1, digest=one.frozen.digest)
        again.model.load_state_dict(weights)
        await again.core.load_state_dict(saved)
        assert again.frozen.held, "they came with the checkpoint"

        for held in (one, again):  # who restores another model's, and is refused, gets the run's back
            held.model.load_state_dict(Model(frozen=4).state_dict())
            with pytest.raises(ValueError, match="not those of the checkpoint"):
                await held.core.load_state_dict(saved)
            assert not held.frozen.held
            held.model.layer.load_state_dict({k[6:]: v for k, v in weights.items() if k.startswith("layer")})
        one.model.table.copy_(weights["table"])
        one.model.scale.copy_(weights["scale"])
        await one.core.load_state_dict(saved)
        await together(one.train(4), again.train(4))
        assert again.frozen.held and whole(again, one)

        other = await swarm.peer(frozen=1)
        other.model.load_state_dict(weights)
        position = other.core.position
        with pytest.raises(ValueError, match="other frozen weights"):
            await other.core.load_state_dict(saved)
        assert other.core.position == position
        del saved["swarm"][TERM]  # of a former version
        await other.core.load_state_dict(saved)


def test_through_the_public_class(tmp_path: Path) -> None:
    def optimizer(dht: DHT, model: Model, **options: Any) -> Optimizer:
        made = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        return Optimizer(dht=dht, run_id="run", target_batch_size=4, optimizer=made, **options)

    def step(opt: Optimizer, model: Model) -> None:
        model(torch.arange(4)).sum().backward()
        opt.step(batch_size=4)

    one, two, shapes = Model(), Model(seed=1, frozen=1), Model().to("meta")
    with dhts(3) as (first, second, third), ExitStack() as stack:
        donor = stack.enter_context(optimizer(first, one, frozen_parameters=one.named_parameters()))
        run = {"frozen_digest": donor.frozen_digest}
        named = {"frozen_parameters": two.named_parameters(), "frozen_directory": tmp_path}
        newcomer = stack.enter_context(optimizer(second, two, **named, **run))
        helper = stack.enter_context(optimizer(third, shapes, auxiliary=True, **run))
        step(donor, one)
        assert newcomer.load_state_from_peers() and (tmp_path / FILE).exists()
        assert all(map(torch.equal, one.parameters(), two.parameters()))
        terms = [each._core.config.fingerprint for each in (donor, newcomer, helper)]
        assert terms == [{TERM: donor.frozen_digest}] * 3
    with dhts(1) as (dht,):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            optimizer(dht, one, frozen_parameters=one.parameters(), frozen_digest="mine")
        for options, compares in (({}, True), ({"frozen_parameters": ()}, False)):
            with optimizer(dht, one, **options) as plain:
                assert bool(plain.core.frozen.frozen.base) == compares and not plain.frozen_digest
