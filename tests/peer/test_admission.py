from __future__ import annotations

from collections.abc import Mapping

import pytest

from swarmcli.errors import FingerprintError
from swarmcli.events import Event, PeerRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity
from swarmcli.peer.admission import Admission
from swarmcli.testing.memory_network import MemoryNetwork
from swarmcli.testing.virtual_time import run

MINE = {"protocol": "1", "sequence_len": "aa", "optimizer.learning_rate": "bb"}


async def meet(run_id: str, fingerprint: Mapping[str, str], *, serve: bool = True) -> tuple[int, list[Event]]:
    """A newcomer asks a peer of the run "demo"; what it was told, and what the peer reported."""
    network, reported = MemoryNetwork(), []
    old = Endpoint(network.transport(Identity.from_seed(1)))
    new = Endpoint(network.transport(Identity.from_seed(2)))
    await old.start()
    await new.start()
    old.events.subscribe(reported.append)
    try:
        if serve:
            Admission(old, "demo", MINE)
        contact = await new.connect(old.addresses[0], timeout=5.0)
        welcomed = await Admission(new, run_id, fingerprint).ask([contact])
        return len(welcomed), reported
    finally:
        await new.close()
        await old.close()


def test_equal_recipes_are_welcome() -> None:
    welcomed, reported = run(meet("demo", MINE))
    assert welcomed == 1
    assert not [event for event in reported if isinstance(event, PeerRefused)]


def test_the_differing_keys_are_named_at_the_newcomer() -> None:
    theirs = {**MINE, "sequence_len": "other", "seed": "new"}
    with pytest.raises(FingerprintError, match="differs in seed, sequence_len") as refusal:
        run(meet("demo", theirs))
    assert refusal.value.keys == ("seed", "sequence_len")


def test_the_differing_keys_are_named_at_the_run() -> None:
    async def main() -> list[Event]:
        network, reported = MemoryNetwork(), []
        old, new = (Endpoint(network.transport(Identity.from_seed(seed))) for seed in (1, 2))
        await old.start()
        await new.start()
        old.events.subscribe(reported.append)
        Admission(old, "demo", MINE)
        contact = await new.connect(old.addresses[0], timeout=5.0)
        with pytest.raises(FingerprintError):
            await Admission(new, "demo", {}).ask([contact])
        await new.close()
        await old.close()
        return reported

    (refused,) = [event for event in run(main()) if isinstance(event, PeerRefused)]
    assert refused.peer == Identity.from_seed(2).peer_id.text
    assert "protocol" in refused.reason


def test_a_peer_of_another_run_is_told_so() -> None:
    with pytest.raises(FingerprintError, match="takes part in another run: 'demo', not 'mine'"):
        run(meet("mine", MINE))


def test_a_contact_that_serves_no_run_yet_is_passed_over() -> None:
    welcomed, _ = run(meet("demo", MINE, serve=False))
    assert welcomed == 0
