"""Groups: their id covers everything in them, and no dishonest value gets in."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from swarmcli.averaging.group import MAX_GATHERED_BYTES, Group, Member
from swarmcli.network import wire
from swarmcli.network.identity import Identity

IDS = [Identity.from_seed(seed).peer_id for seed in range(3)]
NONCE = bytes(16)


def make_group(**changes: object) -> Group:
    members = tuple(Member(peer, addresses=("memory://x",), gathered=b"note") for peer in IDS)
    group = Group(tag=b"tag", nonce=NONCE, members=members, part_shares=(0.5, 0.25, 0.25))
    return dataclasses.replace(group, **changes)


def with_first_member(**changes: object) -> Group:
    group = make_group()
    return make_group(members=(dataclasses.replace(group.members[0], **changes), *group.members[1:]))


def test_group_id_covers_every_field() -> None:
    variants = [
        make_group(),
        make_group(tag=b"other"),
        make_group(nonce=bytes(15) + b"\1"),
        make_group(part_shares=(0.25, 0.5, 0.25)),
        make_group(members=tuple(reversed(make_group().members))),
        with_first_member(listening=False),
        with_first_member(auxiliary=True),
        with_first_member(bandwidth=2.0),
        with_first_member(addresses=()),
        with_first_member(addresses=("memory://", "x")),
        with_first_member(gathered=b"other"),
        with_first_member(peer_id=Identity.from_seed(7).peer_id),
    ]
    assert len({group.group_id for group in variants}) == len(variants)
    assert make_group().group_id == make_group().group_id
    assert len(make_group().group_id) == 32


def test_a_group_is_the_same_at_those_who_are_sent_it() -> None:
    group = make_group()
    assert Group.form(b"tag", group.members, [0.5, 0.25, 0.25], NONCE) == group
    group_id = group.group_id  # which is computed anew at the other end
    sent = msgspec.msgpack.decode(wire.encode(group))
    assert set(sent) == {"tag", "nonce", "members", "part_shares", "listed"}
    assert wire.decode(Group, wire.encode(group)).group_id == group_id


@pytest.mark.parametrize("bandwidth", [math.nan, math.inf, -1.0])
def test_bad_bandwidth_is_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Member(IDS[0], bandwidth=bandwidth)


def test_too_much_gathered_data_is_refused() -> None:
    Member(IDS[0], gathered=bytes(MAX_GATHERED_BYTES))
    with pytest.raises(ValueError, match="gathered"):
        Member(IDS[0], gathered=bytes(MAX_GATHERED_BYTES + 1))


@pytest.mark.parametrize("addresses", [("a",) * 9, ("a" * 513,)])
def test_too_many_or_long_addresses_cost_only_themselves(addresses: tuple[str, ...]) -> None:
    assert Member(IDS[0], addresses=addresses).addresses == tuple(each for each in addresses if len(each) == 1)[:8]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tag": bytes(257)}, "tag"),
        ({"nonce": b"short"}, "nonce"),
        ({"members": (), "part_shares": ()}, "members"),
        ({"members": (Member(IDS[0]),) * 3}, "twice"),
        ({"part_shares": (1.0,)}, "shares"),
        ({"part_shares": (math.nan, 0.0, 0.0)}, "shares"),
        ({"part_shares": (-1.0, 1.0, 1.0)}, "shares"),
        ({"part_shares": (0.0, 0.0, 0.0)}, "shares"),
        ({"part_shares": (1e308, 1e308, 1e308)}, "shares"),
    ],
)
def test_groups_that_no_honest_leader_sends(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_group(**changes)


def test_checks_hold_for_decoded_values_too() -> None:
    """Decoding builds the same values, so a hostile message meets the same bounds."""
    with pytest.raises(msgspec.ValidationError, match="bandwidth"):
        msgspec.convert({"peer_id": bytes(IDS[0]), "bandwidth": -1.0}, Member, dec_hook=lambda kind, value: kind(value))
