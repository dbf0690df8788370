"""Which addresses are dialed because the other end names them, and how long a pair is left alone."""

import pytest

from swarmcli.network.identity import Identity
from swarmcli.reach.budgets import CONTROL_LIMITS, TRIES
from swarmcli.reach.punch_rules import (
    Patience,
    acceptable,
    behind_one_router,
    nearby,
    pairs_of,
)

ANN, BEN = (Identity.from_seed(name).peer_id for name in (b"ann", b"ben"))
OURS = "tcp://5.2.0.1:40001"


@pytest.mark.parametrize(
    "named",
    [
        "tcp://192.168.1.1:8080",  # in our own network
        "tcp://127.0.0.1:8080",
        "tcp://100.64.0.7:8080",  # in our provider's
        "tcp://224.0.0.1:8080",
        "tcp://0.0.0.0:8080",
        "tcp://255.255.255.255:8080",
        "tcp://5.3.0.1:443",  # a server's port
        "tcp://example.org:8080",
        "tcp://[2a00:3::1]:8080",  # of another family than ours
        "tcp://[::ffff:192.168.1.1]:8080",
        "memory://ben:8080",
        "relay://" + ANN.text + "/" + BEN.text,
        "rubbish",
    ],
)
def test_what_cannot_be_a_router_in_the_internet_is_not_dialed(named):
    assert acceptable(named, OURS) is None
    assert pairs_of([OURS], [named]) == []


def test_a_private_address_is_dialed_only_by_ends_that_are_seen_in_private_networks_themselves():
    inside = "tcp://10.1.0.1:40001"
    assert str(acceptable("tcp://10.2.0.1:40002", inside)) == "tcp://10.2.0.1:40002"
    assert acceptable("tcp://5.3.0.1:40002", inside) is None


def test_ipv6_comes_before_ipv4_and_only_families_that_both_ends_have_count():
    ours = [OURS, "tcp://[2a00:2::2]:40001"]
    theirs = ["tcp://5.3.0.1:40002", "tcp://[2a00:3::2]:40002", "tcp://5.4.0.1:40003"]
    assert pairs_of(ours, theirs) == [("IPv6", ours[1], theirs[1]), ("IPv4", ours[0], theirs[0])]
    assert pairs_of(ours[:1], theirs[1:2]) == []


def test_only_addresses_of_this_machines_own_networks_are_dialed_as_nearby():
    def is_near(host):
        return host.startswith(("192.168.1.", "127."))

    named = ["tcp://192.168.1.9:22", "tcp://127.0.0.1:5000", "tcp://10.0.0.1:5000", "x", "tcp://192.168.1.9:5000"]
    assert nearby(named, is_near) == ("tcp://192.168.1.9:5000",)
    assert behind_one_router(pairs_of([OURS], ["tcp://5.2.0.1:40077"]))
    assert not behind_one_router(pairs_of([OURS], ["tcp://5.3.0.1:40077"]))


def test_a_peer_has_a_named_host_dialed_as_often_as_one_attempt_tries_and_then_two_minutes_later_again():
    budget = CONTROL_LIMITS.meter()
    assert [budget.take(0.0, peer=ANN, network="5.3.0.1") for _ in range(TRIES + 1)] == [True] * TRIES + [False]
    assert [budget.take(120.0, peer=ANN, network="5.3.0.1") for _ in range(TRIES + 1)] == [True] * TRIES + [False]


def test_a_crowd_of_identities_does_not_have_one_host_flooded():
    budget = CONTROL_LIMITS.meter()
    crowd = [Identity.from_seed(f"{number}".encode()).peer_id for number in range(200)]
    sent = sum(budget.take(second, peer=peer, network="5.3.0.1") for second in range(60) for peer in crowd)
    assert sent <= 24 + 60 / 20


def test_pairs_that_fail_are_left_alone_for_longer_each_time_but_not_for_ever():
    patience, now, pauses = Patience(), 0.0, []
    for _ in range(12):
        patience.failed(ANN, now)
        pauses.append(patience.due(ANN) - now)
        now = patience.due(ANN)
    assert pauses[:4] == [120.0, 240.0, 480.0, 960.0]
    assert pauses[-1] == 3600.0
    assert patience.due(BEN) < 0.0
    patience.forget()
    assert patience.due(ANN) < 0.0


def test_a_direct_connection_that_breaks_again_and_again_is_not_made_again_and_again():
    patience = Patience()
    patience.worked(ANN, 0.0)
    patience.worked(ANN, 130.0)
    patience.worked(ANN, 400.0)
    assert patience.due(ANN) - 400.0 == 480.0
