"""The part of a recipe that peers hand to a volunteer with a link, and reading one that a stranger handed out.

What travels is a JSON object (so YAML too, but without aliases and tags): the keys that must agree, and those in which
the run's author may advise volunteers (`advised` in the schema). Nothing of `local`, no directory, no contact.

The config of a saved model travels too, and the hashes of its tokenizer's files: the very values that the link's
fingerprint covers. So a newcomer that has checked them can check each file that comes later.

A recipe that was handed out is hostile until `read_offered` has returned it. By then it hashes to what the link says,
sets nothing that is the volunteer's to choose, and names no path outside the directory that this computer keeps for the
run. Reading it runs nothing, asks nothing of the Hub, and opens no file but those of models that lie in that directory.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmcli.errors import RecipeError
from swarmcli.recipe.dataset import CHATML, FORMATS, LOCAL_BUILDERS, AnyDataset, FilesDataset, HuggingFaceDataset
from swarmcli.recipe.document import entries_of, is_section
from swarmcli.recipe.fingerprint import agreed_values, contents_of, digest_of, preprocessing_of, values_of
from swarmcli.recipe.link import Link, command_of
from swarmcli.recipe.load import recipe_of
from swarmcli.recipe.patterns import NAME, ON_HUB
from swarmcli.recipe.pretrained import (
    COMMIT,
    CONFIG,
    MODELS,
    Pretrained,
    is_preprocessing,
    saved_model,
    saved_tokenizer,
)
from swarmcli.recipe.schema import Recipe
from swarmcli.recipe.section import is_advised, is_shared
from swarmcli.words import harmless, listed, printable, some

MAX_OFFERED = 1 << 18  # bytes of a recipe at most, and of the config and hashes that come with it
# where paths of datasets begin in that directory: apart from the peers' own files, which are not to be learned
DATA = "data"

_OWN_NAMES = {DATA, MODELS, "recipe.yaml", "agreed.json", "invitation"}
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?|.*\.")  # on Windows
_PIECES = re.compile("layer|block|expert|depth|stage")
_LOADS = re.compile("^_|implementation|kernel|remote_code|quantization|pretrained")
# Saved configs have these fields, which say nothing of the model that is built.
_REMARKS = ("_name_or_path", "_attn_implementation_autoset", "task_specific_params", "id2label", "label2id")


# Bounds: a stranger wrote the recipe, and its outline is built before anybody has agreed to anything.
MOST_VALUES = 5000
MOST_WORDS = 4000  # characters of a refusal, which quotes the stranger's recipe
MOST_SECONDS = 86_400.0  # the longest time that the recipe may set
MOST_NUMBER = 1 << 31  # in a model's config …
MOST_PIECES = 1024  # … and of layers and the like, which are built one by one
MOST_FILES = 32  # of a tokenizer …
MOST_FILES_BYTES = 64 << 20  # … and of all its files together: the largest known tokenizer has 35 MB


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """How a run goes, as the peer says that handed out its recipe: for estimates of what joining will take.

    0 is unknown: the time of an epoch or, where all three counts are 0, the peers that take part.
    """

    epoch_seconds: float = 0.0
    trainers: int = 0
    monitors: int = 0
    auxiliaries: int = 0


UNKNOWN = RunEstimate()


def offered(recipe: Recipe) -> str:
    """Returns the part of its recipe that this peer hands out. Of a directory with a model or tokenizer only the last
    name travels.

    Raises RecipeError with key and fix for a recipe that `read_offered` would refuse wherever it arrives.
    """
    values: dict[str, Any] = values_of(recipe, _travels, lambda section, name: name in section.model_fields_set)
    values |= _as_links_name(_directories(recipe))
    text = json.dumps(values, ensure_ascii=False, indent=1)
    try:
        again = _parse(text.encode(), "the recipe as a link hands it out", recipe.directory)
        if _without_directories(again) != _without_directories(recipe):
            raise RecipeError(f"{recipe.file}: it holds a value that JSON cannot carry")
        offered_contents(recipe)
    except RecipeError as error:
        raise RecipeError(f"This run cannot be joined by a link: {error}") from None
    return text


def offered_contents(recipe: Recipe) -> str:
    """Returns the config of the saved model and the hashes of the tokenizer's files, as JSON; "": the recipe names
    none. Raises RecipeError as `offered` does."""
    saved = [each for each in (saved_model(recipe), saved_tokenizer(recipe)) if each is not None]
    if not saved:
        return ""
    nbytes = sum(path.stat().st_size for path in offered_files(recipe).values())
    if nbytes > MOST_FILES_BYTES:
        most = f"{MOST_FILES_BYTES >> 20} MiB"
        raise saved[-1].refuse(f"its tokenizer has {nbytes >> 20} MiB", f"links bring {most}; take a smaller one")
    text = json.dumps(contents_of(recipe), ensure_ascii=False)
    _read_contents(recipe, text, recipe.file)
    return text


def offered_files(recipe: Recipe) -> dict[str, Path]:
    """Returns the tokenizer's files by their names."""
    tokenizer = saved_tokenizer(recipe)
    return {} if tokenizer is None else preprocessing_of(tokenizer)


def files_of(recipe: Recipe, contents: Mapping[str, Any], got: Mapping[str, bytes]) -> dict[Path, bytes]:
    """Returns what each file of the recipe's saved model and tokenizer holds, by its place here. `got`: the tokenizer's
    files."""
    model, tokenizer, found = saved_model(recipe), saved_tokenizer(recipe), dict[Path, bytes]()
    if tokenizer is not None:
        found = {tokenizer.brought / name: data for name, data in got.items()}
    if model is not None:
        found[model.brought / CONFIG] = json.dumps(contents["base_model"], ensure_ascii=False).encode()
    return found


def read_offered(
    data: bytes, link: Link, directory: Path, contents: str = "", keep: Callable[[Mapping[str, Any]], object] = bool
) -> Recipe:
    """Returns the recipe that a peer handed out for a link, checked against the link; its paths begin in `directory`.
    `contents`: what the peer says of saved models; once these are checked as well, `keep` gets them, unless all files
    are here.

    Raises RecipeError in words that are safe to print. Reading it is safe before the user has agreed: see the module.
    """
    recipe = _parse(data, f"the recipe from {link.peer_id.short}", directory)
    if recipe.run_id != link.run_id:
        raise RecipeError(
            f"{recipe.origin('run_id')}: run_id is {recipe.run_id!r}, and the link is one of {link.run_id!r}; ask for "
            "another link"
        )
    wanted = [each for each in (saved_model(recipe), saved_tokenizer(recipe)) if each is not None]
    missing = next((each for each in wanted if not each.brought.is_dir()), None)
    if missing is not None and not contents:
        raise missing.refuse(
            "it is a saved model or tokenizer, which that peer does not hand out",
            f"ask for the link of another peer, or put it at {missing.brought} and join again",
        )
    digest, known = "", dict[str, Any]()
    if missing is None:
        try:
            digest = digest_of(recipe)
        except RecipeError:  # only a part of the files is here: a process was killed while it wrote them
            if not contents:
                raise
    if digest != link.fingerprint and wanted and contents:
        known = _read_contents(recipe, contents, f"the recipe from {link.peer_id.short}")
        digest = digest_of(recipe, known)
    if digest != link.fingerprint:
        raise RecipeError(
            f"{recipe.file}: it is not the one that the link speaks of (fingerprint {digest}, not "
            f"{link.fingerprint}); either that peer exchanged it, or the link is from before an upgrade of its swarm "
            "(no link of 0.1 holds): ask for a new link, which `swarm link` prints there"
        )
    if known:
        keep(known)
    return recipe


def _directories(recipe: Recipe) -> list[Pretrained]:
    """Returns those of its saved models and tokenizers that a recipe names by a directory, each with the key that names
    it."""
    found = [saved_model(recipe)]
    if recipe.tokenizer is not None and (tokenizer := saved_tokenizer(recipe)) is not None:
        found.append(replace(tokenizer, key="tokenizer"))
    return [saved for saved in found if saved is not None and saved.revision is None]


def _as_links_name(directories: list[Pretrained]) -> dict[str, str]:
    """Returns the names under which directories travel: only the last part of a path. Two with one name are told
    apart."""
    names: dict[str, str] = {}  # by the directory
    for saved in directories:
        name = Path(saved.text).expanduser().name
        name = f"{MODELS}/{name if re.fullmatch(NAME, name) else 'model'}"
        names.setdefault(saved.text, f"{name}-{saved.key}" if name in names.values() else name)
    return {saved.key: names[saved.text] for saved in directories}


def web_host(file: str) -> str:
    """Returns the host that an item of `data_files` is downloaded from; "" for a file of this computer."""
    scheme, separator, rest = file.partition("://")
    return "" if not separator else "huggingface.co" if scheme == "hf" else rest.partition("/")[0]


# Data, which no link brings

DATA_OPTION = "--set local.data_dir=DIRECTORY"


def joining(link: Link, recipe: Recipe) -> str:
    """Returns the command by which a stranger trains; at its end, the option that names data which no link brings."""
    return with_data(command_of(link), data_in_words(recipe))


def with_data(command: str, needs: str) -> str:
    """Returns a command to join a run, of which `needs_in_words` says `needs`."""
    return f"{command} {DATA_OPTION}" if DATA_OPTION in needs else command


def needs_in_words(recipe: Recipe) -> str:
    """Says what joining takes beside the link; "" if nothing."""
    closed = (
        "This run is closed: whoever joins needs an invitation, which its owner puts into a link with `swarm invite`."
    )
    return " ".join(filter(None, [closed if recipe.access != "open" else "", data_in_words(recipe)]))


def data_in_words(recipe: Recipe) -> str:
    """Says which data a trainer needs beside a link; "" if none."""
    names = listed([printable(file, 80) for dataset in recipe.datasets for file in of_this_computer(dataset)])
    return names and (
        f"A link brings no data: whoever trains needs a copy of {names}, and names the directory that contains the "
        f"copy: {DATA_OPTION}."
    )


def check_data_here(recipe: Recipe) -> None:
    """Raises RecipeError if there is nothing at a place whose data a trainer reads."""
    if gone := data_lacking(recipe, recipe.datasets):
        raise RecipeError(
            f"no data come by a link, and this run's are not on this computer: {gone}, or help without data by "
            "`swarm aux`"
        )


def data_lacking(recipe: Recipe, datasets: Iterable[AnyDataset]) -> str:
    """Says where data of this computer should be, and what helps; "" if something is at each place."""
    if not (gone := lacking(recipe, datasets)):
        return ""
    return (
        f"nothing is at {printable(some(list(map(str, gone))), 1000)}; put the data there, or name the directory in "
        "which they begin by --set local.data_dir=DIRECTORY"
    )


def evaluated_datasets(recipe: Recipe) -> Sequence[AnyDataset]:
    """Returns the datasets on which, or on a part of which, a peer evaluates; none: the run is not evaluated."""
    if not recipe.evaluation.every_epochs:
        return ()
    return recipe.datasets if recipe.evaluation.dataset is None else (recipe.evaluation.dataset,)


def lacking(recipe: Recipe, datasets: Iterable[AnyDataset]) -> list[Path]:
    """Returns the places of this computer that datasets name and where there is nothing; of a pattern its fixed
    beginning counts. It looks whether something is there, opens nothing, and tells only its caller."""
    named = [file for dataset in datasets for file in of_this_computer(dataset)]
    places = [(recipe.locate(file, data=True), re.sub(r"[^/]*[*?[].*", "", file) or ".") for file in named]
    return [
        place
        for place, fixed in places
        if not os.path.exists(recipe.locate(fixed, data=True))  # noqa: PTH110  # no error for names that are too long
    ]


def of_this_computer(dataset: AnyDataset) -> list[str]:
    """Returns the files, directories and patterns of this computer that a dataset names, as the recipe writes them."""
    if isinstance(dataset, FilesDataset):
        return [dataset.path]
    if isinstance(dataset, HuggingFaceDataset) and dataset.path in LOCAL_BUILDERS:  # else they are the Hub's
        return [file for file in dataset.data_files if not web_host(file)]
    return []


# Reading


def _parse(data: bytes, name: str, directory: Path) -> Recipe:
    """Checks all that can be checked without the link and without opening a file."""
    try:
        if len(data) > MAX_OFFERED:
            raise RecipeError(f"{name}: larger than {MAX_OFFERED >> 10} KiB, so this is no recipe")
        text = data.decode()
        root = entries_of(_read_json(text), name, MOST_VALUES)
        if not isinstance(root.value, dict):
            raise ValueError
        recipe = recipe_of(root, text, name=name, directory=directory)
        problems = [*_foreign(recipe), *_problems(recipe)]
        if problems:
            raise RecipeError(
                "\n".join(f"{recipe.origin(*path)}: {'.'.join(map(str, path))} {p}" for path, p in problems)
            )
    except (ValueError, RecursionError):  # from decoding; everything else that is wrong is a RecipeError already
        raise RecipeError(
            f"{name}: no JSON object in UTF-8 that has each key once, so this is no recipe that a peer hands out"
        ) from None
    except RecipeError as error:
        text = harmless(str(error)[: MOST_WORDS + 1])
        raise RecipeError(text if len(text) <= MOST_WORDS else text[:MOST_WORDS] + "…") from None
    return recipe


def _read_contents(recipe: Recipe, text: str, name: str) -> dict[str, Any]:
    """Reads what a peer says about the recipe's saved model and tokenizer, within bounds. The fingerprint tells later
    if it is true."""
    try:
        if len(text.encode()) > MAX_OFFERED:
            raise RecipeError(f"{name}: config and hashes of more than {MAX_OFFERED >> 10} KiB, too large for a link")
        found = _read_json(text)
        entries_of(found, name, MAX_OFFERED)  # its depth
        files, config = found["tokenizer"], found.get("base_model")
        named = {"tokenizer", "base_model"} if saved_model(recipe) else {"tokenizer"}
        if found.keys() != named or (files == "bytes") != (saved_tokenizer(recipe) is None):
            raise ValueError
        for file, digest in [] if files == "bytes" else files.items():
            if not (is_preprocessing(file) and re.fullmatch("[0-9a-f]{64}", digest)):
                raise RecipeError(f"{name}: a tokenizer has no file {file!r:.80}, so none comes by a link")
        if len(files) > MOST_FILES:
            raise RecipeError(f"{name}: a tokenizer of more than {MOST_FILES} files, too many for a link")
        if "base_model" in named and not isinstance(config, dict):
            raise ValueError
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise RecipeError(f"{name}: what it says of its saved model has not the form that peers hand out") from None
    problems = [f"{'.'.join(map(str, path))} {problem}" for path, problem in _config_problems(config, "base_model")]
    if problems:
        raise RecipeError(harmless(f"{name}: {CONFIG}: {'; '.join(problems)[:MOST_WORDS]}"))
    return dict(found)


def _read_json(text: str) -> Any:
    """Raises ValueError or RecursionError for what is no JSON, gives a key twice, or holds a lone surrogate, which an
    escape may write and no file and no hash can hold."""
    found = json.loads(text, object_pairs_hook=_object)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError
    return values


Problem = tuple[tuple[str | int, ...], str]


def _foreign(section: BaseModel, *path: str) -> Iterator[Problem]:
    """Yields keys that are the volunteer's to choose."""
    for name, info in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        if is_section(info.annotation):
            yield from _foreign(getattr(section, name), *path, name)
        elif not _travels(info):
            yield (*path, name), "is for each volunteer to choose and travels in no link; ask for a link without it"


def _problems(recipe: Recipe) -> Iterator[Problem]:
    # The peers' files lie in a directory named by run_id, beside what a recipe reads and what is kept of a link.
    if recipe.run_id.lower() in _OWN_NAMES or _RESERVED.fullmatch(recipe.run_id):
        yield ("run_id",), f"is {recipe.run_id!r}, a name that this computer uses itself; the run needs another one"
    for saved in _directories(recipe):
        if not re.fullmatch(f"{MODELS}/{NAME}", saved.text):
            yield (saved.key,), f"is a path of another computer; a link carries {MODELS}/ and a name"
    for key in ("revision", "tokenizer_revision"):
        if not COMMIT.fullmatch(getattr(recipe, key) or "0" * 40):
            yield (key,), "is no commit, so it may change; write one, as `swarm validate` tells it"
    if recipe.chat_template not in (None, CHATML):
        yield ("chat_template",), _PROGRAM
    if isinstance(recipe.base_model, Mapping):
        yield from _config_problems(recipe.base_model, "base_model")
    for index, dataset in enumerate(recipe.datasets):
        yield from (((("datasets", index, *path)), problem) for path, problem in _dataset_problems(dataset))
    if recipe.evaluation.dataset is not None:
        found = _dataset_problems(recipe.evaluation.dataset)
        yield from (((("evaluation", "dataset", *path)), problem) for path, problem in found)
    for key in ("matchmaking_time", "averaging_timeout", "load_state_timeout"):
        if getattr(recipe.averaging, key) > MOST_SECONDS:
            yield ("averaging", key), f"is more than a day; write {MOST_SECONDS:g} seconds or less"


_PROGRAM = (
    "is a program that volunteers would run; write chatml, or leave it out and save the template with the tokenizer"
)
_OUTSIDE = (
    "leads out of the run's data directory, so it would read other files of a volunteer; write it relative, without "
    "`..` and `~`, and say by local.data_dir where it begins on your own computer"
)


def _is_inside(text: str) -> bool:
    """Whether a path, or a pattern of paths, stays below its beginning, on every system."""
    if not text.isprintable() or text.startswith(("/", "~")) or set("\\:") & set(text):
        return False
    return ".." not in text.split("/")


def _dataset_problems(dataset: AnyDataset) -> Iterator[Problem]:
    if isinstance(dataset, FilesDataset):
        for key in ("path", "glob"):
            if not _is_inside(getattr(dataset, key)):
                yield (key,), _OUTSIDE
    elif isinstance(dataset, HuggingFaceDataset):
        yield from _hub_problems(dataset)


def _hub_problems(dataset: HuggingFaceDataset) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if dataset.chat_template not in (None, CHATML):
        yield ("chat_template",), _PROGRAM
    if dataset.path in FORMATS:
        if not dataset.data_files:
            yield ("path",), f"{dataset.path!r} reads files, and none is named; add data_files"
    elif not ON_HUB.fullmatch(dataset.path):
        yield ("path",), f"must be owner/name of a dataset on the Hub, or one of {', '.join(FORMATS)} with data_files"
    for number, file in enumerate(dataset.data_files):
        if "://" in file and not _is_public(file):
            yield ("data_files", number), "must be https:// and the name of a public host, or hf://; correct it"
        elif "://" not in file and not _is_inside(file):
            yield ("data_files", number), _OUTSIDE


def _is_public(url: str) -> bool:
    """Whether an address can only lead to a host of the public internet: no port, no password, no chain of file
    systems, no address or name of a local network."""
    scheme, _, rest = url.partition("://")
    if scheme == "hf":
        return rest.isprintable() and not {"::", ".."} & {rest[i : i + 2] for i in range(len(rest))}
    host = rest.partition("/")[0]
    if scheme != "https" or not re.fullmatch(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+", host) or "::" in url:
        return False
    if "drive.google.com" in rest and host != "drive.google.com":
        return False  # for such an address the library `datasets` has code of its own, which keeps none of our rules
    try:
        ipaddress.ip_address(host)
    except ValueError:  # a name: its last part must be no number, and no name of local networks
        last = host.rpartition(".")[2].lower()
        return (
            url.isprintable() and not last.isdigit() and last not in ("local", "internal", "lan", "home", "localhost")
        )
    return False


def _config_problems(value: Any, *path: str | int) -> Iterator[Problem]:
    """transformers judges a config, but it would build sizes without bounds before it does, and it passes on unread
    what stands in a config's sections, where an attention may be a repository whose code is fetched and run."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in _REMARKS:
                continue
            shape = not item or (isinstance(item, int | float) and item is not True)
            if _LOADS.search(str(key)) and not shape:
                yield (*path, key), "chooses code and not a shape, which is for each volunteer; remove it"
            else:
                yield from _config_problems(item, *path, key)
    elif isinstance(value, str):
        if set("/\\:") & set(value) or "--" in value:
            yield path, "names a path or an address, and a config that a link brings needs neither; remove it"
    elif isinstance(value, list | tuple):
        if len(value) > MOST_PIECES:
            yield path, f"has more than {MOST_PIECES} items; no model has so many"
        else:
            for index, item in enumerate(value):
                yield from _config_problems(item, *path, index)
    elif isinstance(value, int) and not isinstance(value, bool):
        most = MOST_PIECES if any(_PIECES.search(str(key)) for key in path) else MOST_NUMBER
        if abs(value) > most:
            yield path, f"is more than {most:,}; no model that volunteers can train has so many"


# Handing out


def _travels(info: FieldInfo) -> bool:
    return is_shared(info) or is_advised(info)


def _without_directories(recipe: Recipe) -> dict[str, Any]:
    """Returns the values that must agree, without directories, which count by their contents wherever they lie."""
    directories = {saved.key for saved in _directories(recipe)}
    return {key: value for key, value in agreed_values(recipe).items() if key not in directories}
