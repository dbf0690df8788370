"""Config and tokenizer of a saved model over real TCP, from a peer of the run to somebody with nothing but the link."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import typer

from swarmcli.cli import consent, linking
from swarmcli.cli.linking import recipe_named
from swarmcli.errors import RecipeError, SwarmError
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.peer import offering
from swarmcli.peer.linked import LinkedRun
from swarmcli.peer.offering import FILE_METHOD, PIECE, FilePiece, FileWanted, RecipeService, fetch_recipe
from swarmcli.recipe import Link, Recipe, digest_of, fingerprint_of, load_recipe, offered, parse_recipe
from swarmcli.recipe.offered import offered_contents, offered_files
from swarmcli.training.tasks import build_task
from swarmcli.training.tokenizer import ByteTokenizer
from tests.hub_stand_in import Hub, hub
from tests.peer.test_offering import contact, with_others

__all__ = ["hub"]

CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 259}
TEXT = "run_id: small\ndatasets:\n  - source: stdlib\nsequence_len: 16\ntarget_batch_size: 32\n"
Serve = Callable[[Endpoint], object]


@pytest.fixture
def owned(tmp_path: Path) -> Recipe:
    """The recipe of somebody who has the model in a directory, with a tokenizer of three pieces."""
    home = tmp_path / "owner" / "tiny"
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(CONFIG))
    ByteTokenizer().save(home)
    told = json.loads((home / "tokenizer.json").read_text())
    (home / "tokenizer.json").write_text(json.dumps(told) + " " * (2 * PIECE + 7))
    (home / "chat_template.jinja").write_text("")
    return parse_recipe(f"{TEXT}base_model: tiny\n", directory=home.parent)


def serving(recipe: Recipe) -> Serve:
    text, contents, files = offered(recipe), offered_contents(recipe), offered_files(recipe)
    return lambda endpoint: RecipeService(endpoint, "small", text, contents=contents, files=files)


def giving(recipe: Recipe, give: Callable[[FileWanted, bytes], Any]) -> Serve:
    """As a peer of the run, but for the files."""
    files = {name: path.read_bytes() for name, path in offered_files(recipe).items()}

    async def handle(peer: PeerID, wanted: FileWanted) -> FilePiece:
        given = give(wanted, files[wanted.name])
        return await given if asyncio.iscoroutine(given) else given

    def serve(endpoint: Endpoint) -> None:
        RecipeService(endpoint, "small", offered(recipe), contents=offered_contents(recipe))
        endpoint.serve(FILE_METHOD, FileWanted, handle)

    return serve


def never(wanted: FileWanted, data: bytes) -> Any:
    return asyncio.Event().wait()


def slow(wanted: FileWanted, data: bytes) -> Any:
    return never(wanted, data)


def honest(wanted: FileWanted, data: bytes) -> FilePiece:
    return FilePiece(len(data), data[wanted.offset : wanted.offset + PIECE])


def fetched(recipe: Recipe, directory: Path, *serves: Serve) -> dict[str, bytes]:
    """What comes from contacts of the run, by the name of the place."""
    found: dict[Path, bytes] = {}

    async def meet(left: list[Serve], links: list[Link]) -> None:
        if left:
            async with contact(left[0]) as link:
                await meet(left[1:], [*links, link])
        else:
            link = replace(with_others(links[0], *links[1:]), fingerprint=digest_of(recipe))
            await asyncio.to_thread(fetch_recipe, link, directory, found.update)

    asyncio.run(meet(list(serves), []))
    return {path.relative_to(directory).as_posix(): data for path, data in found.items()}


def test_config_and_tokenizer_come_with_the_recipe_and_what_a_killed_process_left_half_comes_again(
    owned: Recipe, tmp_path: Path
) -> None:
    came = fetched(owned, tmp_path / "mine", serving(owned))
    home, mine = tmp_path / "owner" / "tiny", tmp_path / "mine" / "models" / "tiny"
    assert came["models/tiny/tokenizer.json"] == (home / "tokenizer.json").read_bytes()
    assert not (tmp_path / "mine").exists(), "whoever asked writes them"
    mine.mkdir(parents=True)
    for left in ("tokenizer.json", "config.json"):
        (mine / left).write_bytes((home / left).read_bytes()[: -1 if left == "config.json" else None])
        came = fetched(owned, tmp_path / "mine", serving(owned))
        assert set(came) == {f"models/tiny/{p.name}" for p in home.iterdir()}
        (mine / left).unlink()


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda wanted, data: honest(wanted, data.replace(b"a", b"b")), "gives another .* than the link speaks of"),
        (lambda wanted, data: FilePiece(len(data), b""), "in other pieces than it says"),
        (lambda wanted, data: FilePiece(len(data), data[wanted.offset : wanted.offset + 1]), "in other pieces"),
        (lambda wanted, data: FilePiece(len(data) + wanted.offset, bytes(PIECE)), "in other pieces than it says"),
        (lambda wanted, data: FilePiece(64 << 20, bytes(PIECE)), "or too much of it"),
        (lambda wanted, data: FilePiece(1, bytes(PIECE)), "in other pieces than it says"),
        (lambda wanted, data: FilePiece(1 << 40, bytes(PIECE)), "did not come"),
        (lambda wanted, data: FilePiece(len(data), bytes(2 * PIECE)), "did not come"),
        (lambda wanted, data: FileWanted("x", "y", 0), "did not come"),
        (never, "the files of the tokenizer did not come from .*; try again"),
        (slow, r"did not come from .*: it takes more than 0\.3 s"),
    ],
)
def test_a_contact_that_gives_something_else_is_refused(
    owned: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give: Any, words: str
) -> None:
    msgspec.msgpack.Decoder(FilePiece)  # reads the bounds of its fields once: before they are lowered here
    # Of 64 MiB the first bytes are taken, and no more than are left for all files.
    monkeypatch.setattr(offering, "MOST_FILES_BYTES", (64 << 20) - 1)
    monkeypatch.setattr(offering, "PIECE_SECONDS", 0.5 if give is never else 30.0)
    monkeypatch.setattr(offering, "FILES_SECONDS", 0.3 if give is slow else 300.0)
    with pytest.raises(SwarmError, match=words):
        fetched(owned, tmp_path / "mine", giving(owned, give))
    assert not (tmp_path / "mine").exists()


def test_what_one_peer_of_the_link_does_not_give_another_one_gives(
    owned: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offering, "HEAD_START", 0.05)
    lying = giving(owned, lambda wanted, data: honest(wanted, data.upper()))
    came = fetched(owned, tmp_path / "mine", giving(owned, never), lying, serving(owned))
    assert len(came) == 4
    with pytest.raises(RecipeError, match=r"which that peer does not hand out; ask for .*mine/models/tiny"):  # an older
        fetched(owned, tmp_path / "mine", lambda endpoint: RecipeService(endpoint, "small", offered(owned)))


# The whole way


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_DATA_DIR", str(tmp_path / "data"))
    # A process of its own would find out the same, in seconds.
    outline = "swarmcli.training.outline.outline_of"
    monkeypatch.setattr(outline, lambda recipe: build_task(recipe).build_model(outline=True))
    return tmp_path / "data"


def served(serve: Serve, fingerprint: str, action: Callable[[Link], object]) -> None:
    async def main() -> None:
        async with contact(serve) as link:
            await asyncio.to_thread(action, replace(link, fingerprint=fingerprint))

    asyncio.run(main())


def test_a_volunteer_needs_nothing_but_the_link(
    owned: Recipe, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def action(link: Link) -> None:
        for _ in ("asked for", "kept"):
            named = recipe_named(str(link), "trainer", [], yes=True)
        assert fingerprint_of(load_recipe(named.path)) == fingerprint_of(owned)
        task: Any = build_task(named.recipe)
        assert task.tokenizer.encode("ab").tolist() == [97, 98]
        model: Any = task.build_model()
        assert model.lacks_weights and model.config.n_embd == 16
        assert offered_contents(named.recipe) == offered_contents(owned), "so it hands them out as well"
        (named.path.parent / "models" / "tiny" / "tokenizer.json").write_text("{}")
        assert LinkedRun(link).kept() is None, "what was changed is fetched again"
        recipe_named(str(link), "trainer", [], yes=True)
        assert LinkedRun(link).kept() is not None

    served(serving(owned), digest_of(owned), action)
    said = capfd.readouterr().err
    assert "kB of config and tokenizer, from that peer, checked by the link" in " ".join(said.split())


def test_who_does_not_agree_keeps_nothing(owned: Recipe, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "ask", lambda role: False)
    monkeypatch.setattr(linking, "check_at_once", lambda role, recipe, *, yes: None)  # there is a terminal

    def action(link: Link) -> None:
        with pytest.raises(typer.Exit):
            recipe_named(str(link), "auxiliary", [], yes=False)
        assert not list(data.rglob("*"))
        with pytest.raises(RecipeError, match="--set changes seed"):
            recipe_named(str(link), "auxiliary", ["seed=9"], yes=True)
        assert not list(data.rglob("*"))
        mine = LinkedRun(link)
        mine.bring({mine.path / "models" / "tiny" / "config.json": b"{}"})
        recipe_named(str(link), "trainer", [], yes=True)  # as another process has agreed meanwhile
        mine.forget()
        assert LinkedRun(link).kept() is not None

    served(serving(owned), digest_of(owned), action)


def test_a_model_of_the_hub_comes_by_the_link_too_and_its_frozen_weights_from_the_hub_if_it_answers(
    hub: Hub, owned: Recipe, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = owned.locate("tiny")
    model: Any = build_task(owned).build_model()
    model.save_pretrained(home)
    commit = hub.push("acme/tiny", home)
    text = f"{TEXT}base_model: acme/tiny\nrevision: {commit}\n"
    frozen = "unfrozen_parameters: [lm_head]\nfrozen_weights: " + "0" * 64
    hub_model, part_of_it = parse_recipe(text), parse_recipe(f"{text}{frozen}\n")
    whole, part = ((serving(each), digest_of(each)) for each in (hub_model, part_of_it))
    hub.asked.clear()
    # The volunteer has another cache.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(data.parent / "volunteers"))

    def action(link: Link) -> None:
        named = recipe_named(str(link), "trainer", [], yes=True)
        assert hub.asked == [], "nobody asks the Hub before the answer"
        mine: Any = build_task(named.recipe).build_model()
        if named.recipe.frozen_weights is None:
            assert mine.lacks_weights and hub.asked == [], "the state of the run brings them"
            return
        assert set(hub.downloads()) == {"model.safetensors", "generation_config.json"}
        pairs = zip(mine.parameters(), model.parameters(), strict=True)
        assert not hasattr(mine, "lacks_weights") and all(torch.equal(a, b) for a, b in pairs)

    served(*whole, action)
    served(*part, action)
    hub.leave()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(data.parent / "another"))
    monkeypatch.setenv("SWARM_DATA_DIR", str(data.parent / "other data"))

    def without_hub(link: Link) -> None:
        named = recipe_named(str(link), "trainer", [], yes=True)
        mine: Any = build_task(named.recipe).build_model()
        assert mine.lacks_weights

    served(*part, without_hub)
