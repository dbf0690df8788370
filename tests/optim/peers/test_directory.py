"""What peers tell people and each other about themselves."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from swarmcli.dht.records import OwnedSubkey, Record, encode_subkey, encode_value, sign_record
from swarmcli.dht.writing import deliver
from swarmcli.events import EpochReported, PeerSeen
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.membership import Membership
from swarmcli.optim.config import PeerDescription
from swarmcli.optim.peers.directory import PeerDirectory
from swarmcli.optim.peers.follow import Claims
from swarmcli.optim.peers.report import PeerMetrics, PeerReport, describe
from swarmcli.optim.peers.survey import Survey
from swarmcli.optim.state.lineage import LineagePosition
from tests.optim.optim_swarm import nodes, record
from tests.simulation import simulated

FIRST, SECOND, THIRD = (LineagePosition(epoch, 10 * epoch, bytes([epoch + 1]) * 32) for epoch in range(3))

OTHER = LineagePosition(0, 0, bytes([9]) * 32)


class Peer:
    """A peer that only says where it stands."""

    def __init__(self, node, position=FIRST, phase="training", name="", role="trainer", terms="") -> None:
        self.node, self.position, self.phase, self.terms = node, position, phase, terms
        self.description = PeerDescription(role, name)
        self.directory = PeerDirectory(node, "run", self.report)
        self.claims = Claims(self.directory)
        self.survey = Survey(self.claims)
        self.metrics = PeerMetrics(node.peer_id, node.endpoint.events)

    def report(self) -> PeerReport:
        return describe(self.node, self.description, self.terms, self.metrics, self.phase, self.position)

    def end_epoch(self, position: LineagePosition, loss: float) -> None:
        self.position = position
        self.metrics.note_loss(loss, 4)
        self.metrics.end_epoch(position)


async def started(*peers: Peer) -> None:
    for peer in peers:
        await peer.survey.start()
    for peer in peers:
        await peer.directory.refresh()


async def ended(*peers: Peer) -> None:
    for peer in peers:
        await peer.survey.shutdown()


@simulated
async def test_who_says_goodbye_tells_how_its_last_epoch_went() -> None:
    async with nodes(2) as members:
        seen, losses = record(members[0], PeerSeen), record(members[0], EpochReported)
        watcher, peer = Peer(members[0]), Peer(members[1])
        peer.end_epoch(SECOND, 3.0)
        await started(watcher, peer)
        peer.end_epoch(THIRD, 2.0)  # and leaves before anybody reads of it
        await ended(peer)
        await asyncio.sleep(10)
        assert (seen[-1].peer, seen[-1].epoch, seen[-1].gone) == (members[1].peer_id.text, 2, "left")
        assert [(told.epoch, told.loss) for told in losses] == [(1, 3.0), (2, 2.0)], "each is told once"
        await ended(watcher)


@pytest.mark.parametrize(
    ("own", "position", "phase", "expected"),
    [
        pytest.param(SECOND, FIRST, "training", "followed", id="it may be about to take in the same round"),
        pytest.param(SECOND, FIRST, "joining", "alone", id="a newcomer takes its time"),
        pytest.param(THIRD, FIRST, "training", "alone", id="two epochs behind it has missed a round"),
        pytest.param(FIRST, FIRST, "training", "company", id="a trainer of this lineage"),
        pytest.param(FIRST, FIRST, "following", "company", id="a follower"),
        pytest.param(FIRST, FIRST, "joining", "alone", id="one that may yet join this lineage"),
        pytest.param(FIRST, SECOND, "training", "behind", id="one that is ahead"),
        pytest.param(FIRST, SECOND, "lingering", "behind", id="one that is done, further ahead"),
        pytest.param(FIRST, SECOND, "joining", "alone", id="one that has not settled there"),
        pytest.param(FIRST, SECOND, "assisting", "alone", id="an auxiliary that says it is ahead"),
        pytest.param(FIRST, FIRST, "assisting", "alone", id="an auxiliary"),
        pytest.param(FIRST, FIRST, "lingering", "alone", id="one that is done"),
        pytest.param(FIRST, OTHER, "training", "alone", id="another lineage that will yield"),
    ],
)
@simulated
async def test_surroundings(own: LineagePosition, position: LineagePosition, phase: str, expected: str) -> None:
    async with nodes(2) as members:
        one, other = Peer(members[0], own), Peer(members[1], position, phase)
        await started(one, other)
        assert await one.survey.surroundings(own) == expected
        await ended(one, other)


@simulated
async def test_a_peer_with_another_fingerprint_is_seen_but_counts_for_nothing() -> None:
    async with nodes(2) as members:
        one, stranger = Peer(members[0], terms="ours"), Peer(members[1], THIRD, terms="theirs")
        await started(one, stranger)
        assert members[1].peer_id in one.directory.others
        assert one.claims.reported() == []
        assert await one.survey.survey() == {}
        assert await one.survey.ask([members[1].peer_id]) == {}
        assert await one.survey.surroundings(FIRST) == "alone"
        await ended(one, stranger)


@simulated
async def test_anyone_behind() -> None:
    async with nodes(3) as members:
        done, last, helper = Peer(members[0], THIRD), Peer(members[1], SECOND), Peer(members[2], FIRST, "assisting")
        await started(done, last, helper)
        assert await done.survey.anyone_behind(2)
        last.position = THIRD
        assert not await done.survey.anyone_behind(2)
        await ended(done, last, helper)


@pytest.mark.parametrize(
    "broken",
    [
        {"role": "king"},
        {"name": "x" * 65},
        {"lineage": "zz" * 32},
        {"lineage": "00" * 31},
        {"epoch": -1},
        {"loss": float("nan")},
        {"evaluation": {"epoch": 1, "loss": float("nan"), "samples": 1}},
        {"addresses": ["tcp://x"] * 9},
        {"addresses": ["t" * 513]},
        {"last_reason": "x" * 201},
        {"of_a_later_version": "x" * 2048},
    ],
)
@simulated
async def test_malformed_reports_are_refused(broken) -> None:
    async with nodes(1) as members:
        good = Peer(members[0]).report().model_dump()
        assert PeerReport.model_validate(good)
        with pytest.raises(ValidationError):
            PeerReport.model_validate(good | broken)


@simulated
async def test_a_report_of_a_later_version_is_read_without_what_this_one_does_not_know() -> None:
    async with nodes(1) as members:
        good = Peer(members[0]).report().model_dump()
        assert PeerReport.model_validate(good | {"secret": 1}).model_dump() == good


@simulated
async def test_who_is_no_member_any_more_has_left_and_is_not_waited_for() -> None:
    async with nodes(3) as members:
        one, other = Peer(members[1]), Peer(members[2])
        await started(one, other)
        await one.directory.refresh()
        seen = record(one.node, PeerSeen)
        out: set[PeerID] = {other.node.peer_id}
        one.node.endpoint.membership = cast(Membership, SimpleNamespace(is_out=out.__contains__))
        await one.directory.refresh()
        assert not one.directory.others
        assert [(event.peer, event.gone) for event in seen] == [(other.node.peer_id.text, "left")]
        out.clear()  # it has another invitation
        assert other.node.peer_id in await one.directory.refresh()
        one.node.endpoint.membership = None
        await ended(one, other)


@simulated
async def test_whoever_is_connected_is_asked_before_those_who_only_name_an_address() -> None:
    """400 reports of far epochs, each by an identity at a silent address in another network, kept a newcomer from
    joining for 151 s."""
    async with nodes(3) as members:
        newcomer, honest = Peer(members[1]), Peer(members[2])
        await started(newcomer, honest)
        await members[1].endpoint.connect(members[2].endpoint.addresses[0], timeout=5)
        now, report = members[0].endpoint.clock.now(), honest.report().model_dump()
        records = []
        for number in range(40):
            identity = Identity.from_seed(f"throwaway {number}".encode())
            said = {"addresses": [f"memory://20.0.{number}.1:4000"], "epoch": 1000, "lineage": f"{number:064x}"}
            value = encode_value(report | said)
            record = Record("run_peers", encode_subkey(OwnedSubkey(identity.peer_id)), value, now + 60, sequence=1)
            records.append(sign_record(identity, record))
        contact = members[0].core.contacts.table.get(members[1].peer_id)
        assert contact is not None
        await deliver(members[0].core, contact, records)
        others = await newcomer.directory.refresh()
        assert len(others) == 41
        assert newcomer.claims.in_turn(others)[0] == honest.node.peer_id
        await ended(newcomer, honest)
