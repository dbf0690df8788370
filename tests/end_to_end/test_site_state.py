"""What real sites with a sharded optimizer keep on their disks, and who goes on from it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.site_processes import ranks
from tests.end_to_end.swarm import Swarm

pytestmark = pytest.mark.e2e

MakeSwarm = Callable[..., Swarm]
SITE = ("--nproc", "2", "--set", "local.site.zero=true")


def saved(home: Path) -> list[int]:
    """The epochs of the states that a site could go on from."""
    return sorted(int(path.name.partition("-")[2]) for path in (home / "site").glob("epoch-*"))


@pytest.mark.soak
def test_a_site_alone_loses_an_epoch_at_most_and_others_go_on_from_its_files(swarm: MakeSwarm) -> None:
    run = swarm(1000, target=512)
    site = run.start("join", "site", *SITE)
    run.wait_for_epoch("site", 3, site)
    run.wait(lambda: len(saved(run.home("site"))) == 2, "it has saved", site)
    before = ranks(site)[1]
    os.kill(before, signal.SIGKILL)
    at = saved(run.home("site"))[-1]
    run.wait(lambda: before not in ranks(site).values() and len(ranks(site)) == 2, "it is started again", site)
    run.wait(lambda: len(run.lives("site")) == 2, "its second life is in the journal", site)
    again = run.lives("site")[1]
    # The first life may have ended epochs beyond the last state that it had time to save.
    run.wait(lambda: any(each.time > again and each.epoch >= at + 3 for each in run.epochs("site")), "it goes on", site)
    assert min(each.epoch for each in run.epochs("site") if each.time > again) >= at  # nobody else knew the state
    os.kill(site.pid, signal.SIGINT)
    run.wait_for_end(site, 130)
    said = site.log.read_text()
    assert "Traceback" not in said
    told = re.search(r"left at epoch \d+ after ([\d,]+) samples", said)
    of_last_life = sum(each.own_samples for each in run.epochs("site") if each.time > again)
    assert told and int(told[1].replace(",", "")) > of_last_life  # those of the life before count
    last = saved(run.home("site"))[-1]
    assert last >= at + 3

    alone = run.start("join", "alone", "--resume", str(run.home("site")), "--set", f"max_epochs={last + 2}")
    run.wait_for_end(alone, 0)
    assert next(each.epoch for each in run.epochs("alone")) >= last
    assert (run.home("alone") / "checkpoints" / f"epoch-{last + 2:06d}").is_dir()

    resumed = run.start("join", "again", *SITE, "--resume", str(run.home("alone")), "--set", f"max_epochs={last + 4}")
    run.wait_for_end(resumed, 0)
    assert next(each.epoch for each in run.epochs("again")) >= last + 2
    shards = run.home("again") / "checkpoints" / f"epoch-{last + 4:06d}" / "shards"
    assert sorted(path.name for path in shards.glob("*.safetensors")) == [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
