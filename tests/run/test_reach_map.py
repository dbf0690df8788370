from __future__ import annotations

from contextlib import ExitStack

import pytest

from swarmcli.dht import DHT
from swarmcli.network.identity import Identity
from swarmcli.run.reach_map import MOST_TOLD, ReachMaps, WaysReply, decoded, encoded, map_of
from swarmcli.run.values import PeerStatus, RunStatus

ME, ADA, BOB, CEM = (Identity.from_seed(number).peer_id for number in range(1, 5))


def status(*ids: object) -> RunStatus:
    peers = tuple(
        PeerStatus(peer_id=str(peer), role="trainer", epoch=1, me=peer == ME, client_mode=peer == BOB) for peer in ids
    )
    return RunStatus(
        run_id="r", state="training", peer_id=ME.text, role="trainer", epoch=1, samples=0, target=1, reach="well",
        peers=peers,
    )  # fmt: skip


def test_what_a_peer_tells_comes_out_as_it_was() -> None:
    ways = encoded({ADA: ("direct", True), BOB: ("relayed", False), CEM: ("punched", True)})
    assert decoded(ways) == {ADA: "direct", BOB: "relayed", CEM: "punched"}


@pytest.mark.parametrize(
    "reply",
    [
        WaysReply(bytes(ADA), b"\x00\x00"),
        WaysReply(bytes(ADA), b"\x03"),
        WaysReply(bytes(ADA)[:-1], b"\x00"),
        WaysReply(bytes(ADA) * (MOST_TOLD + 1), bytes(MOST_TOLD + 1)),
    ],
)
def test_an_answer_that_is_none_tells_nothing(reply: WaysReply) -> None:
    assert decoded(reply) == {}


def test_every_pair_is_there_once_and_own_knowledge_goes_first() -> None:
    told = {ADA: {ME: "relayed", BOB: "punched", CEM: "direct", ADA: "direct"}, BOB: {ADA: "relayed"}}
    shown = map_of(status(ME, ADA, BOB), ME, {ADA: ("direct", True), BOB: ("relayed", False)}, told)  # type: ignore[arg-type]
    assert [(edge.source, edge.target, edge.way, edge.told_by) for edge in shown.edges] == [
        (ME.text, ADA.text, "direct", ME.text),
        (BOB.text, ME.text, "relayed", ME.text),
        (ADA.text, BOB.text, "punched", ADA.text),  # Cem is no peer of the run
    ]
    assert [node.dialable for node in shown.nodes] == [True, True, False] and shown.sentence == "well"


def test_peers_ask_each_other_for_their_ways() -> None:
    with ExitStack() as stack:
        first = DHT(start=True, host="127.0.0.1")
        stack.callback(first.shutdown)
        addresses = [str(each) for each in first.get_visible_addresses()]
        others = [DHT(addresses, start=True, host="127.0.0.1") for _ in range(2)]
        for dht in others:
            stack.callback(dht.shutdown)
        ids = [dht.peer_id for dht in (first, *others)]
        (address, *_) = others[1].get_visible_addresses()
        others[0].run_coroutine(others[0].endpoint.connect(str(address), timeout=30.0))
        maps = [
            stack.enter_context(
                ReachMaps(dht, "r", lambda me=dht.peer_id: [peer for peer in ids if peer != me], lambda: status(*ids))
            )
            for dht in (first, *others)
        ]
        shown = maps[0].look().edges
        assert len(shown) == 3 and {edge.way for edge in shown} == {"direct"}
        assert {edge.told_by for edge in shown} > {ids[0].text}  # of the connection between the others they tell
