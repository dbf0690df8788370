"""Processes find each other, send messages directly, and learn when one of them is gone."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.sharding.transfer import MOST
from swarmcli.sites.links import receive_message, receive_tensors, send_message, send_tensors, sever
from swarmcli.sites.site import Site
from tests.sharding.processes import Worlds
from tests.sharding.threads import ranks

LARGE = 1 << 20


@ranks(3)
def test_all_hear_what_rank_0_says() -> None:
    with Site.form(timeout=10) as site:
        site.meet()
        assert site.any(site.rank == 1) and not site.any(False)
        assert site.share(bytes, b"a name" if site.rank == 0 else b"") == b"a name"
        assert site.share(bytes, b"") == b""
        if site.rank == 1:
            send_message(site.group, bytes(LARGE), 0)
        if site.rank == 0:
            assert receive_message(bytes, site.group, 1) == bytes(LARGE)


def form_from_the_environment() -> list[int]:
    site = Site.form(timeout=10)
    site.meet()
    found = [site.rank, site.size, *site.others]
    site.close()
    site.close()
    assert not dist.is_initialized()
    with pytest.raises(SiteError, match="does not take what it is sent"):
        send_message(site.group, b"", 0)
    return found


@pytest.mark.e2e
def test_a_site_forms_from_the_environment_that_torchrun_makes(worlds: Worlds) -> None:
    assert worlds(2, grouped=False).run(form_from_the_environment) == [[0, 2, 1], [1, 2, 1]]


@ranks(2)
def test_breaking_off_wakes_all_threads_of_all_ranks() -> None:
    """As a thread of rank 0 does after its command has failed."""
    site = Site.form(timeout=10)
    if site.rank == 0:
        with pytest.raises(SiteError):
            receive_tensors(site.group, [torch.empty(1)], 1)
        return
    failed: list[SiteError] = []

    def wait() -> None:
        with pytest.raises(SiteError) as error:
            receive_tensors(site.group, [torch.empty(1)], 0)
        failed.append(error.value)

    thread = threading.Thread(target=wait)
    thread.start()
    site.break_off()
    thread.join()
    site.break_off()
    assert "rank 0 is gone" in str(failed[0])
    with pytest.raises(SiteError, match="rank 0 is gone, or does not take"):
        send_tensors(site.group, [torch.zeros(1)], 0)


def sever_what_is_gone() -> None:
    """As a thread does whose main thread has closed the site meanwhile."""
    site = Site.form(timeout=5.0)
    site.meet()
    group = site.group
    site.close()
    sever(group)


@pytest.mark.e2e
def test_breaking_off_after_the_end_does_nothing(worlds: Worlds) -> None:
    worlds(2, grouped=False).run(sever_what_is_gone)


@pytest.mark.parametrize("who", [0, 1])
@ranks(2)
def test_a_site_that_forms_has_patience(who: int) -> None:
    """Rank `who` takes several times the site's timeout before it meets the others."""
    with Site.form(timeout=0.1) as site:
        if site.rank == who:
            threading.Event().wait(0.3)
        assert site.share(bytes, b"still here") == b"still here"
        site.meet()


@ranks(2)
def test_rank_0_is_waited_for_as_long_as_it_lives_and_waits_for_others_up_to_the_timeout() -> None:
    """The timeout is for the others. A send to rank 0 waits for it as a receive does; one from rank 0 has a limit."""
    with Site.form(timeout=0.1) as site:
        if site.rank:
            send_tensors(site.group, [torch.ones(1)], 0)
            dist.barrier()
        else:
            threading.Event().wait(0.3)
            receive_tensors(site.group, [torch.empty(1)], 1)
            with pytest.raises(SiteError, match="rank 1 is gone, or does not take what it is sent: Timed out"):
                send_tensors(site.group, [torch.ones(1)], 1)
            dist.barrier()


@ranks(2)
def test_messages_have_a_bound() -> None:
    with Site.form(timeout=10) as site:
        if site.rank:
            send_tensors(site.group, [torch.tensor([MOST + 1])], 0)
            site.share(bytes, b"")
        else:
            with pytest.raises(SiteError, match="announced a message of"):
                receive_message(bytes, site.group, 1)
            site.share(bytes, b"")


def test_a_timeout_is_positive() -> None:
    with pytest.raises(ValueError, match="timeout=0"):
        Site.form(timeout=0)
