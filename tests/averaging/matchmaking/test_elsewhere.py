"""When a round that has begun without a peer keeps it from another one."""

from swarmcli.averaging.matchmaking.elsewhere import Elsewhere
from tests.averaging.table import peer_id

ME, *OTHERS = (peer_id(number) for number in range(6))


def test_it_outweighs_a_group_that_is_no_larger() -> None:
    elsewhere = Elsewhere()
    elsewhere.note(OTHERS[0], OTHERS[:2], known=OTHERS)
    assert elsewhere.outweighs([])
    assert elsewhere.outweighs(OTHERS[3:4])
    assert not elsewhere.outweighs(OTHERS[2:4])


def test_only_known_mates_count_and_none_of_the_own_group() -> None:
    elsewhere = Elsewhere()
    elsewhere.note(OTHERS[0], [peer_id(number) for number in range(50, 99)], known=OTHERS)
    assert not elsewhere.outweighs(OTHERS[1:2])
    elsewhere.note(OTHERS[0], OTHERS[1:4], known=OTHERS)
    assert not elsewhere.outweighs(OTHERS[1:4])


def test_who_is_back_does_not_count() -> None:
    elsewhere = Elsewhere()
    elsewhere.note(OTHERS[0], [], known=OTHERS)
    elsewhere.back(OTHERS[0])
    assert not elsewhere.outweighs([])
