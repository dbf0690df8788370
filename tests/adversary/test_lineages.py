"""Peers that lie about where the run is, and about its state: honest ones go on, and end with equal bits."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest

from swarmcli.events import Event, Noticed, PeerRefused, StateDownloaded
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.peers.proof import MOST_STEPS, LineageProof, LineageWay, Saved, Step
from swarmcli.optim.state.lineage import ANY_ROUND, LineagePosition
from swarmcli.state.witnesses import contradicted
from tests.adversary.company import liar_of
from tests.adversary.lies import LIES
from tests.adversary.lies.lineages import FAR, forged_step
from tests.optim.optim_swarm import Swarm, digests, record, together
from tests.simulation import now, simulated
from tests.suites import soak

CLAIMS = ["an epoch far ahead", "always one epoch ahead", "a flood of reports", "forged certificates", "an old proof"]
FEW = [(CLAIMS[0], True), (CLAIMS[1], True), (CLAIMS[2], False)]
OTHERS = [case for case in itertools.product(CLAIMS, [True, False]) if case not in FEW]


@pytest.mark.parametrize(("name", "mate"), [*FEW, *soak(OTHERS)])
@simulated
async def test_a_claim_moves_nobody(name: str, mate: bool) -> None:
    """Two honest trainers beside a liar that has trained with them, or never has."""
    async with Swarm() as swarm:
        honest = [await swarm.trainer(seed=1) for _ in range(2)]
        await together(*(trainer.train(2) for trainer in honest))
        false = await swarm.trainer(seed=1)
        await false.core.join()
        if mate:
            end = max(trainer.epoch for trainer in honest) + 3
            await together(*(trainer.train(end) for trainer in [*honest, false]))
        liar = liar_of(false)
        LIES[name].tell(liar)
        downloads = [record(trainer.node, StateDownloaded) for trainer in honest]
        began, end = now(), max(trainer.epoch for trainer in honest) + 4
        goes_on = name in ("always one epoch ahead", "a flood of reports")
        lying = asyncio.ensure_future(false.train(end)) if goes_on else None
        await together(*(trainer.train(end) for trainer in honest))
        assert liar.told
        assert len(digests(honest)) == 1 and downloads == [[], []]
        assert all(trainer.core.tracker.global_epoch <= end for trainer in honest)
        assert now() - began < 4 * 1.0 + 15
        if lying is not None:
            lying.cancel()
            await asyncio.wait([lying])


@pytest.mark.parametrize("mate", ["gone", *soak(["none", "there"])])
@simulated
async def test_one_stranger_with_a_state_leads_away_who_has_no_mate_to_ask(mate: str) -> None:
    """Not covered, see docs/security.md: the user hears of it."""
    async with Swarm() as swarm:
        honest = [await swarm.trainer(seed=1) for _ in range(1 if mate == "none" else 2)]
        await together(*(trainer.train(6) for trainer in honest))
        if mate == "gone":
            await honest.pop().core.shutdown()
            await honest[0].train(10)
        stranger = await swarm.trainer(seed=99)
        far = LineagePosition(60, 10**6, bytes(32))
        stranger.core.replica.state.position = far
        stranger.core.catch_up.settled, stranger.core.phase = True, "training"
        stranger.core.directory.announce(anew=True)
        warnings = record(honest[0].node, Noticed)
        await together(*(trainer.train(24) for trainer in honest))
        assert (honest[0].epoch >= far.epoch) == (mate != "there")
        told = [event.level for event in warnings if "this peer gives up its own" in event.text]
        assert told == ([] if mate == "there" else ["warning"])


@pytest.mark.parametrize("name", ["other weights", "other statistics"])
@simulated
async def test_a_donor_with_another_state_is_found_before_anything_is_taken_over(name: str) -> None:
    async with Swarm() as swarm:
        peers = [await swarm.trainer(seed=1, target=48) for _ in range(4)]
        await together(*(trainer.train(3) for trainer in peers))
        liar = liar_of(peers[0])
        LIES[name].tell(liar)
        newcomer = await swarm.trainer(seed=2, target=48)
        for honest in peers[1:]:  # they tell their roots, and have no time for a download until it is found
            honest.core.exchange.donor._max_downloads = 0

        def have_time(event: Event) -> None:
            for honest in peers[1:] if isinstance(event, PeerRefused) else ():
                honest.core.exchange.donor._max_downloads = 4

        newcomer.node.endpoint.events.subscribe(have_time)
        refused = record(newcomer.node, PeerRefused)
        assert await newcomer.core.join()
        assert liar.told and {event.peer for event in refused} == {peers[0].node.peer_id.text}
        assert newcomer.core.replica.state.digest() == peers[1].core.replica.state.digest()


@pytest.mark.parametrize(
    ("false", "true", "refused"),
    [
        ("bbbbbb", "c", False),  # the donor and one more network bear the state out
        ("bb", "", True),  # of as many networks more peers count
        ("b", "", False),
        ("bc", "aaaa", True),  # the donor's network is one, however many are in it
        ("abb", "c", False),  # what the donor says beside what it gave counts for nothing
    ],
)
def test_networks_count_before_keys_where_peers_contradict_a_state(false: str, true: str, refused: bool) -> None:
    """A peer for each letter, which is its network; the donor is the first of network a."""
    said = [(network, b"false") for network in false] + [(network, b"true") for network in true]
    donor, *others = (PeerID(bytes([number]) * 32) for number in range(1 + len(said)))
    peers = [
        donor if (network, root) == ("a", b"false") else peer
        for peer, (network, root) in zip(others, said, strict=True)
    ]
    networks = {donor: "a"} | {peer: network for peer, (network, _) in zip(peers, said, strict=True)}
    roots = {peer: root for peer, (_, root) in zip(peers, said, strict=True)}
    assert contradicted(b"true", [donor], roots, networks.__getitem__) == refused


@simulated
async def test_a_crowd_in_one_network_does_not_lead_a_newcomer() -> None:
    async with Swarm() as swarm:
        honest = [await swarm.trainer(seed=1) for _ in range(2)]
        await together(*(trainer.train(3) for trainer in honest))
        crowd = [await swarm.trainer(seed=1) for _ in range(5)]
        for each in crowd:
            LIES["one of a crowd"].tell(liar_of(each))
        await asyncio.sleep(5)
        newcomer = await swarm.trainer(seed=2)
        known = {trainer.node.peer_id: number for number, trainer in enumerate(honest)}
        newcomer.core.directory.network_of = lambda peer: known.get(peer, "theirs")  # type: ignore[method-assign]
        assert await newcomer.core.join()
        assert newcomer.core.replica.state.digest() in digests(honest)


# proofs

MATES = [Identity.from_seed(number) for number in range(7)]
IDS = [each.peer_id for each in MATES]


def chain(*signers: list[Identity]) -> list[Step]:
    steps: list[Step] = []
    for number, members in enumerate(signers):
        before = steps[-1].position.lineage if steps else b"a" * 32
        steps.append(forged_step(bytes([number]) * 32, before, 5 + number, members))
    return steps


def test_signatures_of_those_who_are_known_bear_a_position_out() -> None:
    proof = LineageProof(tuple(chain(MATES[:4], MATES[:4])))
    assert proof.leads_to(proof.steps[-1].position)
    assert proof.signed(IDS[:3], 2).members == set(IDS[:3])
    assert proof.signed(IDS[4:], 1).members == set(), "it knows none of them"
    assert proof.signed([*IDS[:1], *IDS[4:]], 2).members == set(), "it knows one of them: that one may be hostile"


def test_members_that_change_step_by_step_are_followed_and_a_minority_is_not() -> None:
    assert LineageProof(tuple(chain(MATES[:4], MATES[2:6]))).signed(IDS[:2], 2).members == set(IDS[:2])
    assert LineageProof(tuple(chain(MATES[:4], MATES[3:7]))).signed(IDS[:2], 2).members == set(), (
        "one of four went there"
    )


def test_a_step_alone_after_a_signed_one_is_not_signed() -> None:
    steps = chain(MATES[:4])
    alone = Step(steps[-1].position.lineage, b"r" * 32, 6, 60)
    assert LineageProof((*steps, alone)).signed(IDS[:4], 2).members == set()


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": FAR},
        {"samples": 1},
        {"round_id": b"x" * 32},
        {"before": b"b" * 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_in_a_step_can_be_altered(change) -> None:
    steps = chain(MATES[:4], MATES[:4])
    position = steps[-1].position
    altered = msgspec.structs.replace(steps[0], **change)
    assert not LineageProof((altered, steps[1])).leads_to(position)
    last = msgspec.structs.replace(steps[1], **change)
    assert not LineageProof((steps[0], last)).leads_to(position)


def test_a_certificate_altered_is_none() -> None:
    [step] = chain(MATES[:4])
    assert step.certificate is not None
    certificate = msgspec.structs.replace(step.certificate, digest=b"d" * 32)
    assert LineageProof((msgspec.structs.replace(step, certificate=certificate),)).signed(IDS[:4], 2).members == set()


def test_where_lineages_count_epochs_a_certificate_is_of_any_round_on_the_one_before() -> None:
    [step] = chain(MATES[:4])
    counted = Step(step.before, ANY_ROUND, 5, 50, step.certificate)
    proof = LineageProof((counted,))
    assert proof.leads_to(counted.position) and proof.signed(IDS[:4], 2).members == set(IDS[:4])


def test_what_is_kept_is_bounded_and_comes_back_from_a_checkpoint() -> None:
    way, steps = LineageWay(), chain(*[MATES[:4]] * (MOST_STEPS + 6))
    for step in steps:
        way.note(step)
    proof = way.proof(steps[-1].position.lineage)
    assert len(proof.steps) == MOST_STEPS and proof.leads_to(steps[-1].position)
    assert way.proof(steps[-3].position.lineage).steps == tuple(steps[6:-2])
    assert way.proof(b"z" * 32).steps == ()
    saved = Saved((tuple(IDS),), proof)
    assert Saved.read(saved.plain()) == saved and Saved.read(None) == Saved()
    for damaged in ("zz", "00", saved.plain()[:-2]):
        with pytest.raises(ValueError, match="standing"):
            Saved.read(damaged)


@simulated
async def test_what_the_owner_signed_leads_whoever_comes_with_it_and_with_no_other_parameters() -> None:
    """The owner's peer knows nobody; a liar shows the same signature and hands out something else."""
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(seed=1) for _ in range(3)]
        await together(*(trainer.train(3) for trainer in trainers))
        saved = await trainers[2].core.state_dict()
        owner, false = [await swarm.trainer(seed=1, role="monitor") for _ in range(2)]
        far = LineagePosition(100, 1000, b"o" * 32)
        parameters = bytes.fromhex(saved["swarm"]["parameters"])
        for trainer in [*trainers, owner, false]:
            trainer.core.claims.vouching.signed_by_owner = lambda position, state, signature: (
                (position, state, signature) == (far, parameters, b"s" * 64)
            )
        LIES["other weights"].tell(liar_of(false))
        for signer in (owner, false):
            signer.weights.data.copy_(trainers[2].weights.data)
            position = {"epoch": far.epoch, "samples_seen": far.samples, "lineage": far.lineage.hex()}
            swarm_part = {**saved["swarm"], **position, "owner": (b"s" * 64).hex(), "standing": None}
            await signer.core.load_state_dict({**saved, "swarm": swarm_part})
            assert not await signer.core.join()
        await together(*(trainer.train(103) for trainer in trainers))
        assert len(digests(trainers)) == 1
        assert trainers[0].core.position.samples > 1000
