from __future__ import annotations

import os
from errno import ENOSPC
from pathlib import Path
from unittest.mock import Mock

import pytest

from swarmcli.errors import RecipeError
from swarmcli.recipe import config
from swarmcli.recipe.limit_store import COMMANDED, KEYS, RUNNING, LimitStore

from .recipes import small


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def write(file: Path, text: str) -> None:
    file.write_text(text)
    os.utime(file, ns=(0, len(text)))  # two writes within one tick of the file system's clock


def test_the_strongest_place_that_says_something_counts(file: Path) -> None:
    write(file, "limits:\n  upload: 2 MB/s\n  threads: 3\n")
    recipe = small("local.limits.threads=4", text=RECIPE)
    store = LimitStore(recipe, file)
    assert (store.limits.upload, store.limits.threads, store.limits.download) == (2e6, 4, 7e6)
    assert store.sources["upload"] == f"{file}:2" and store.sources["threads"] == COMMANDED
    assert store.sources["download"].endswith(":7") and "hours" not in store.sources
    store.change({"threads": "1", "download": None})
    assert (store.limits.threads, store.limits.download) == (1, None)
    assert store.sources["threads"] == RUNNING
    assert store.shown()["download"] == {"value": None, "text": "none", "from": RUNNING}
    store.change({"threads": "default"})
    assert store.limits.threads == 4 and "threads: 3" in file.read_text()


RECIPE = """\
run_id: small
base_model: {model_type: gpt2}
datasets: [{source: stdlib}]
sequence_len: 16
target_batch_size: 32
local:
  limits: {upload: 1 MB/s, download: 7 MB/s}
"""


@pytest.mark.parametrize("word", ["none", None])
def test_every_limit_can_be_lifted_by_a_word(file: Path, word: str | None) -> None:
    store = LimitStore(file=file)
    lifted = store.change(dict.fromkeys(KEYS, word)).model_dump()
    assert lifted.pop("busy_above") == 1.0 and set(lifted.values()) == {None}


def test_on_a_full_disk_limits_are_set_for_now_or_not_at_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LimitStore(file=file)
    monkeypatch.setattr(config, "write_file", Mock(side_effect=OSError(ENOSPC, "No space left on device")))
    with pytest.raises(RecipeError, match=r"No space left on device\), so nothing has changed; .* for now only"):
        store.change({"threads": 2}, keep=True)
    assert store.limits.threads is None and store.change({"threads": 2}).threads == 2


def test_what_is_kept_follows_the_file_but_where_the_command_line_says_something_else(file: Path) -> None:
    store = LimitStore(small("local.limits.threads=4"), file)
    store.change({"upload": "1 MB/s", "threads": 2}, keep=True)
    assert (store.limits.upload, store.limits.threads) == (1e6, 2)
    write(file, "limits: {upload: 9 MB/s, threads: 9}\n")
    assert store.reload() and (store.limits.upload, store.limits.threads) == (9e6, 2)


def test_a_file_that_is_changed_by_hand_is_taken_over(file: Path) -> None:
    store = LimitStore(None, file)
    assert not store.reload()
    write(file, "limits:\n  upload: 2 MB/s\n")
    assert store.reload() and store.limits.upload == 2e6 and not store.reload()
    write(file, "limits:\n  upload: fast, please\n")
    with pytest.raises(RecipeError, match=r"config\.yaml:2"):
        store.reload()
    assert store.limits.upload == 2e6 and not store.reload()


@pytest.mark.parametrize("rest", ["", "\n \n", "limits:\n  upl", "\0\0\0"])
def test_a_file_that_is_emptied_or_torn_lifts_no_limit(file: Path, rest: str) -> None:
    """As a full disk leaves it, or an editor that cuts it off before it writes."""
    write(file, "name: Ada\nlimits:\n  upload: 2 MB/s\n")
    store = LimitStore(None, file)
    write(file, rest)
    with pytest.raises(RecipeError, match=r"config\.yaml.*swarm limits reset" if rest == "" else r"config\.yaml"):
        store.reload()
    assert store.limits.upload == 2e6 and not store.reload()
    write(file, "limits:\n  upload: 10 MB/s\n")
    assert store.reload() and store.limits.upload == 1e7


def test_to_remove_the_file_or_to_reset_the_limits_lifts_them(file: Path) -> None:
    write(file, "limits:\n  upload: 2 MB/s\n")
    removed, reset = LimitStore(None, file), LimitStore(None, file)
    reset.change({"upload": "default"}, keep=True)
    assert reset.limits.upload is None and removed.reload() and removed.limits.upload is None
    write(file, "limits:\n  upload: 2 MB/s\n")
    assert removed.reload() and removed.limits.upload == 2e6
    file.unlink()
    assert not removed.reload() and removed.limits.upload == 2e6  # an editor may have moved it for a moment
    assert removed.reload() and removed.limits.upload is None
