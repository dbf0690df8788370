from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from swarmcli.errors import FingerprintError
from swarmcli.events import Event, MembershipEnded, Noticed, PeerRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.wire.codec import decode, encode
from swarmcli.peer.admission import NEWCOMER, Admission, Hello, Welcome, refusal
from swarmcli.testing.memory_network import MemoryNetwork
from swarmcli.testing.virtual_time import run
from swarmcli.version import build

MINE = {"protocol": "1", "sequence_len": "aa", "optimizer.learning_rate": "bb"}
OTHER = {**MINE, "sequence_len": "other", "seed": "new"}


def hello(fingerprint: Mapping[str, str] = MINE, run_id: str = "demo") -> Hello:
    return Hello(run_id, dict(fingerprint), build())


@asynccontextmanager
async def meeting(*others: Mapping[str, str] | None) -> AsyncIterator[tuple[Endpoint, list[Endpoint], list[PeerID]]]:
    """A newcomer that is connected with peers of the run "demo", each in a network of its own, with these fingerprints;
    None: one that says nothing of a run."""
    async with AsyncExitStack() as stack:
        network = MemoryNetwork()

        async def made(number: int) -> Endpoint:
            endpoint = Endpoint(network.transport(Identity.from_seed(number), host=f"10.{number}.0.1"))
            await endpoint.start()
            stack.push_async_callback(endpoint.close)
            return endpoint

        new, old = await made(100), [await made(number) for number in range(len(others))]
        for endpoint, fingerprint in zip(old, others, strict=True):
            if fingerprint is not None:
                Admission(endpoint, hello(fingerprint))
        yield new, old, [await new.connect(each.addresses[0], timeout=5.0) for each in old]


async def asked(*others: Mapping[str, str] | None, run_id: str = "demo", told: list[Event] | None = None) -> int:
    """How many of these contacts take a newcomer in. What it and the first of them report is in `told`."""
    async with meeting(*others) as (new, old, contacts):
        for endpoint in (new, old[0]):
            endpoint.events.subscribe((told if told is not None else []).append)
        return len(await Admission(new, hello(run_id=run_id)).ask(contacts))


def texts(told: list[Event], kind: Any, name: str) -> list[str]:
    return [getattr(event, name) for event in told if isinstance(event, kind)]


def test_equal_recipes_are_welcome_and_a_contact_that_serves_no_run_yet_is_passed_over() -> None:
    told: list[Event] = []
    assert run(asked(MINE, told=told)) == 1 and not texts(told, PeerRefused, "reason")
    assert run(asked(None)) == 0


def test_the_differing_keys_are_named_at_both_ends_and_a_peer_of_another_run_is_told_so() -> None:
    told: list[Event] = []
    with pytest.raises(FingerprintError, match="differs in seed, sequence_len; take that of the others") as refused:
        run(asked(OTHER, told=told))
    assert refused.value.keys == ("seed", "sequence_len")
    (reason,) = texts(told, PeerRefused, "reason")
    assert "sequence_len" in reason
    with pytest.raises(FingerprintError, match="takes part in another run: 'demo', not 'mine'"):
        run(asked(MINE, run_id="mine"))


def test_one_contact_among_several_that_refuses_stops_nobody() -> None:
    told: list[Event] = []
    assert run(asked(OTHER, MINE, told=told)) == 1
    (warning,) = texts(told, Noticed, "text")
    assert "of 2 contacts 1 take this peer for one of another run" in warning and "sequence_len" in warning
    assert run(asked(OTHER, None)) == 0, "nor while another one has no time"


async def ended(*others: Mapping[str, str] | None, has_state: bool = False, late: bool = False) -> str:
    """Why a newcomer stops whose one contact, the first, had no time for its question; "taken in", or "" where it asks
    on. The others have reports in the run. `late`: the contact has time after a while."""
    async with meeting(*others) as (new, old, peers):
        told: list[Event] = []
        new.events.subscribe(told.append)
        admission, reported = Admission(new, hello()), [] if has_state else peers[1:]
        taken_in = Noticed("info", "taken in")
        work = admission.keep_asking(peers[:1], lambda: reported, lambda: told.append(taken_in))
        admission.tasks.spawn(work)
        if late:
            await asyncio.sleep(NEWCOMER)
            Admission(old[0], hello(OTHER))
        await asyncio.sleep(10.0)
        await admission.close()
        return "".join([*texts(told, MembershipEnded, "reason"), *texts(told, Noticed, "text")])


def test_a_contact_that_was_too_busy_refuses_later() -> None:
    assert "sequence_len" in run(ended(None, late=True))
    assert run(ended(None)) == ""


def test_a_newcomer_whom_nobody_takes_in_goes_by_most_networks_and_one_stranger_stops_nobody_else() -> None:
    """A stranger that settles under the run id with other terms is OTHER, whatever epoch it claims."""
    assert "sequence_len" in run(ended(None, OTHER, OTHER, None))
    assert run(ended(None, OTHER, None)) == "", "half of the networks"
    assert run(ended(None, OTHER, OTHER, MINE)) == "taken in"
    assert run(ended(None, OTHER, OTHER, has_state=True)) == ""


def test_unlike_versions_are_told_before_recipes_and_older_peers_read_what_newer_ones_say() -> None:
    keys = ["seed"]
    same = refusal(keys, build(), {"seed": 7}, "begin another run")
    assert same.startswith("the recipe differs in seed (here 7); take that of the others") and "run" in same
    newer = refusal(keys, "99.3+g0123abcd", {}, "begin another run")
    assert newer.startswith(f"this run uses swarm 99.3+g0123abcd, you have {build()}: `pipx install --force …`")
    assert "`git checkout 0123abcd && pipx install --force .`" in newer
    assert "differs in seed" in newer and "take that" not in newer
    assert refusal([*keys, "protocol"], "", {}, "") == (
        f"this run uses a swarm older than 0.2, you have {build()}: its peers have to be upgraded, or yours goes back: "
        "`pipx install --force …`, the line of its page /join"
    )
    assert "\x1b" not in (odd := refusal(keys, "1\x1b[2J$(reboot)", {}, "")) and "checkout" not in odd

    class OldHello(msgspec.Struct):
        run_id: str
        fingerprint: dict[str, str]

    assert decode(OldHello, encode(hello())) == OldHello("demo", MINE)
    assert decode(Hello, encode(OldHello("demo", MINE))).version == ""
    with pytest.raises(msgspec.ValidationError):
        decode(Welcome, encode(Welcome("demo", [], "9" * 65)))
