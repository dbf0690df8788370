"""What `make docs` adds to the pages of this directory: README, examples and notes, which lie elsewhere, and after
verbs.md the help of every command, written from the commands themselves so that it is true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
VERBS = "docs/verbs.md"
ELSEWHERE = {  # file → the page of the site that it becomes
    "README.md": "readme.md",
    "examples/README.md": "examples.md",
    "benchmarks/NOTES.md": "notes.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "weaknesses.md",
    VERBS: "commands.md",
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are no files of this directory, or more than a file."""
    for source, page in ELSEWHERE.items():
        text = _moved((ROOT / source).read_text(encoding="utf-8"), source)
        if source == VERBS:
            text = "\n".join([text, *_commands()])
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links from this directory to pages that lie elsewhere lead to where the site has them."""
    return markdown if page.file.generated_by else _moved(markdown, f"docs/{page.file.src_uri}")


def _moved(markdown: str, source: str) -> str:
    """The same with links as the site has them. Of what is no page of it (a recipe, a module) the words stay."""
    base = (ROOT / source).parent
    up = "../" * (source.removeprefix("docs/").count("/") if source.startswith("docs/") else 0)

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], (base / match[2]).resolve(), match[3] or ""
        path = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
        if path in ELSEWHERE:
            return f"[{text}]({up}{ELSEWHERE[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({up}{path.removeprefix('docs/')}{anchor})"
        return text if path and target.exists() else match[0]

    return LINK.sub(link, markdown)


def _commands() -> Iterator[str]:
    from swarmcli.cli import main

    for name in main.VERBS:
        yield from _command(main.load(name), f"swarm {name}", 2)


def _command(command: Any, title: str, level: int) -> Iterator[str]:
    yield f"{'#' * level} {title}\n"
    yield _plain(command.help or "") + "\n"
    rows = list(_options(command))
    if rows:
        yield "| | |\n| --- | --- |"
        yield from rows
        yield ""
    for name, each in getattr(command, "commands", {}).items():
        yield from _command(each, f"{title} {name}", level + 1)


def _options(command: Any) -> Iterator[str]:
    for param in command.params:
        if getattr(param, "hidden", False) or param.name == "help":
            continue
        names = [param.metavar or param.name.upper()] if param.param_type_name == "argument" else param.opts
        names = [*names, *param.secondary_opts]
        told = ", ".join(f"`{each}`" for each in names)
        if param.param_type_name == "option" and not param.is_flag:
            told += f" {param.metavar or ''}".rstrip().replace("|", "\\|")
        says = _plain(getattr(param, "help", "") or "").replace("|", "\\|").replace("\n", " ")
        yield f"| {told} | {says} |"


def _plain(text: str) -> str:
    """Without rich's markup; what a shell reads, or what looks like a tag, is shown as it is."""
    text = re.sub(r"\[/?(bold|dim|italic)\]", "", text)
    lines = [f"    {line.strip()}" if line.strip().startswith("swarm ") else line.strip() for line in text.splitlines()]
    return "\n".join(lines).replace("<", "&lt;")
