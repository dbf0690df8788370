"""`swarm service`: a peer that the system starts by itself, and keeps when its user logs out.

Each system has a manager for this that needs no administrator: systemd's user manager, launchd, the task scheduler of
Windows. This module writes the files that they read, and calls their commands.
"""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol
from xml.etree import ElementTree

import typer

from swarmcli.cli.console import err, out
from swarmcli.cli.peers import typed_here
from swarmcli.errors import SwarmError, UsageError
from swarmcli.files.durable import write_file

if TYPE_CHECKING:
    from swarmcli.cli.linking import RecipeToJoin
    from swarmcli.optim.config import Role

# seconds after which a manager kills what it stops: a minute at most to hand in, and perhaps a checkpoint
STOP_SECONDS = 180
COMMAND_SECONDS = STOP_SECONDS + 30.0  # seconds in which a manager has to answer, since it waits for what it stops
RETRY_SECONDS = 60  # seconds between two starts of a peer that failed: its contacts may be away for a while
FINAL_CODES = (2, 4)  # exit codes that would come again: a recipe that cannot be used, a run that refuses
ENCODING = "utf-16" if sys.platform == "win32" else "utf-8"  # of the files that managers read
VERBS = {"trainer": "join", "auxiliary": "aux", "monitor": "monitor"}
# variables of the present shell that the peer needs as well
PASSED_ON = ("SWARM_", "HF_", "XDG_", "OMP_", "CUDA_VISIBLE")


@dataclass(frozen=True, slots=True)
class Service:
    """A peer as a manager starts it."""

    name: str  # the run's, with the role if that is not to train
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path  # where managers without a log of their own write the output

    @property
    def description(self) -> str:
        return f"swarm: this computer helps {self.name}"


class Manager(Protocol):
    """The manager that starts this user's services."""

    def file(self, name: str) -> Path: ...
    def text(self, service: Service) -> str: ...
    def start(self, name: str) -> None: ...
    def stop(self, name: str) -> None: ...
    def look(self, name: str) -> tuple[bool, str]:
        """Returns whether the service runs, and the manager's word for its state."""

    def outlive(self) -> None:
        """Has services go on after their user's session, if the manager has to be asked for that and can be."""
        return None

    def hint(self) -> str:
        """Says what keeps services from outliving a session, and what helps; "": nothing keeps them."""
        return ""

    def log_of(self, name: str) -> str:
        """Returns the command that shows the service's output."""


class Systemd(Manager):
    def file(self, name: str) -> Path:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return base / "systemd" / "user" / f"swarm-{name}.service"

    def text(self, service: Service) -> str:
        environment = "".join(
            f"Environment={_quoted(f'{key}={value}')}\n" for key, value in service.environment.items()
        )
        return (
            f"[Unit]\nDescription={service.description}\nStartLimitIntervalSec=0\n\n"
            f"[Service]\nExecStart={' '.join(map(_quoted, service.command))}\n{environment}"
            f"Restart=on-failure\nRestartSec={RETRY_SECONDS}\n"
            f"RestartPreventExitStatus={' '.join(map(str, FINAL_CODES))}\n"
            f"TimeoutStopSec={STOP_SECONDS}\nNice=10\n\n"
            "[Install]\nWantedBy=default.target\n"
        )

    def start(self, name: str) -> None:
        _ask("systemctl", "--user", "daemon-reload")
        _ask("systemctl", "--user", "enable", "--now", self.file(name).name)
        # a service that ran before has to read the new file
        _ask("systemctl", "--user", "restart", self.file(name).name)

    def stop(self, name: str) -> None:
        _ask("systemctl", "--user", "disable", "--now", self.file(name).name)

    def look(self, name: str) -> tuple[bool, str]:
        state = _ask("systemctl", "--user", "show", self.file(name).name, "-p", "ActiveState", "--value", strict=False)
        return state in ("active", "activating", "reloading"), state or "unknown"

    def outlive(self) -> None:
        """Without lingering, systemd ends a user's services when the user logs out; most systems let users ask for
        it."""
        if self.hint():
            _ask("loginctl", "enable-linger", _user(), strict=False)

    def hint(self) -> str:
        if _ask("loginctl", "show-user", _user(), "-p", "Linger", "--value", strict=False) == "yes":
            return ""
        return f"it ends when you log out; to have it go on, type: sudo loginctl enable-linger {shlex.quote(_user())}"

    def log_of(self, name: str) -> str:
        return f"journalctl --user -u {self.file(name).name}"


class Launchd(Manager):
    def file(self, name: str) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"org.swarm.{name}.plist"

    def text(self, service: Service) -> str:
        return plistlib.dumps(
            {
                "Label": f"org.swarm.{service.name}",
                "ProgramArguments": list(service.command),
                "EnvironmentVariables": dict(service.environment),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": RETRY_SECONDS,
                "ExitTimeOut": STOP_SECONDS,
                "ProcessType": "Background",
                "LowPriorityIO": True,
                "LimitLoadToSessionType": ["Aqua", "Background"],
                "StandardOutPath": str(service.log),
                "StandardErrorPath": str(service.log),
            }
        ).decode()

    def start(self, name: str) -> None:
        self.stop(name)
        _ask("launchctl", "bootstrap", self._domain(), str(self.file(name)))

    def stop(self, name: str) -> None:
        _ask("launchctl", "bootout", f"{self._domain()}/org.swarm.{name}", strict=False)

    def look(self, name: str) -> tuple[bool, str]:
        said = _ask("launchctl", "print", f"{self._domain()}/org.swarm.{name}", strict=False)
        state = re.search(r"^\s*state = (.+)$", said, re.MULTILINE)
        return bool(state and state[1] == "running"), state[1] if state else "not loaded"

    def hint(self) -> str:
        return "a Mac ends it when you log out, and begins it when you log in"

    def log_of(self, name: str) -> str:
        return f"less {shlex.quote(str(log_file(name)))}"

    def _domain(self) -> str:
        return f"gui/{os.getuid()}"


class TaskScheduler(Manager):
    def file(self, name: str) -> Path:
        return log_file(name).with_suffix(".xml")

    def text(self, service: Service) -> str:
        """A task for `schtasks /Create /XML`. S4U runs it without a window, a password or a session. The shell sets the
        variables, and writes the log: a task can do neither."""
        variables = "".join(f'set "{key}={value}" & ' for key, value in service.environment.items())
        line = f'{variables}{subprocess.list2cmdline(service.command)} >> "{service.log}" 2>&1'
        task = ElementTree.Element("Task", version="1.3", xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task")
        _element(task, "RegistrationInfo", Description=service.description)
        _element(_element(task, "Triggers"), "LogonTrigger", Enabled="true", UserId=_user())
        _element(_element(task, "Principals"), "Principal", UserId=_user(), LogonType="S4U", RunLevel="LeastPrivilege")
        settings = _element(
            task,
            "Settings",
            MultipleInstancesPolicy="IgnoreNew",
            DisallowStartIfOnBatteries="false",  # `swarm limits` decides that
            StopIfGoingOnBatteries="false",
            ExecutionTimeLimit="PT0S",
            Priority="8",
        )
        _element(settings, "RestartOnFailure", Interval=f"PT{RETRY_SECONDS}S", Count="999")
        _element(_element(task, "Actions"), "Exec", Command="cmd.exe", Arguments=f'/d /c "{line}"')
        return ElementTree.tostring(task, encoding="unicode")

    def start(self, name: str) -> None:
        _ask("schtasks", "/Create", "/F", "/TN", self._task(name), "/XML", str(self.file(name)))
        _ask("schtasks", "/Run", "/TN", self._task(name))

    def stop(self, name: str) -> None:
        _ask("schtasks", "/End", "/TN", self._task(name), strict=False)
        _ask("schtasks", "/Delete", "/F", "/TN", self._task(name))

    def look(self, name: str) -> tuple[bool, str]:
        said = _ask("schtasks", "/Query", "/FO", "LIST", "/TN", self._task(name), strict=False)
        state = re.search(r"^Status:\s*(.+)$", said, re.MULTILINE)
        return bool(state and state[1].strip() == "Running"), state[1].strip() if state else "not known"

    def log_of(self, name: str) -> str:
        return f'notepad "{log_file(name)}"'

    def _task(self, name: str) -> str:
        return f"swarm-{name}"


def manager() -> Manager:
    """Returns this system's manager."""
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform == "win32":
        return TaskScheduler()
    return Systemd()


def log_file(name: str) -> Path:
    """Returns the file for a service's output, if its manager keeps no log."""
    from swarmcli.machine.places import data_directory

    return data_directory() / f"service-{name}.log"


def _quoted(word: str) -> str:
    """Quotes a word for systemd: even in quotes, percent and dollar signs mean something (systemd.unit(5)), so both are
    doubled."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _element(parent: ElementTree.Element, tag: str, **children: str) -> ElementTree.Element:
    made = ElementTree.SubElement(parent, tag)
    for name, text in children.items():
        ElementTree.SubElement(made, name).text = text
    return made


def _user() -> str:
    import getpass

    return getpass.getuser()


def _ask(*command: str, strict: bool = True) -> str:
    """Returns the manager's answer; with `strict`, raises its error as SwarmError."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if not strict:
            return ""
        why = "does not answer" if isinstance(error, subprocess.TimeoutExpired) else "is not there"
        raise SwarmError(f"{command[0]}, which starts services on this system, {why}") from error
    if strict and done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SwarmError(f"`{shlex.join(command)}` failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout.strip() if done.returncode == 0 else ""


app = typer.Typer(
    help="Start a peer whenever you log in, and again after a failure; on Linux it goes on after you log out.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
ServiceName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which service. Default: the only one.")]


@app.command(context_settings={"ignore_unknown_options": True})
def install(
    recipe: Annotated[str, typer.Argument(metavar="LINK|RECIPE", help="A link to the run, or its recipe file.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS…]", help="Options of swarm join, as you would type them there."),
    ] = None,
    role: Annotated[
        Literal["trainer", "auxiliary", "monitor"], typer.Option(help="What this computer does in the run.")
    ] = "trainer",
    yes: Annotated[bool, typer.Option("--yes", help="Agree to what a link will do on this computer.")] = False,
) -> None:
    """Start a peer now and at each login, and again after a failure; on Linux it goes on after you log out.

    It asks the same question as swarm join, once. A service of the same run id and role is replaced. On Linux a
    peer that the run refuses, or whose recipe cannot be used, is not started again. swarm stop ends it until the next
    login.

    Examples:

    swarm service install "swarm://…"

    swarm service install my-run.yaml --role monitor -- --web 8080
    """
    system, given = manager(), typed_here(options)
    named = _agreed(role, [recipe, *given, *(["--yes"] if yes else [])])
    path = named.path.absolute()
    name = named.recipe.run_id + ("" if role == "trainer" else f"-{role}")
    contacts = [part for address in named.contacts for part in ("--peer", address)]
    command = [sys.executable, "-m", "swarmcli", VERBS[role], str(path), "--quiet", *contacts, *given]
    file = system.file(name)
    if file.exists():
        err.print(f"the service {name} is there already; from now on it starts {path}", soft_wrap=True)
    _write(file, system.text(Service(name, command, _environment(), log_file(name))))
    try:
        system.start(name)
    except SwarmError as error:
        file.unlink(missing_ok=True)
        raise SwarmError(f"{error}\nwithout it, have this started when you log in:\n  {shlex.join(command)}") from error
    err.print(f"the service {name} runs; what it says: {system.log_of(name)}", soft_wrap=True)
    system.outlive()
    if hint := system.hint():
        err.print(hint, soft_wrap=True)
    err.print("`swarm status` shows it, `swarm service remove` ends it for good")


def _agreed(role: Role, words: Sequence[str]) -> RecipeToJoin:
    """Reads these words as the role's own verb does, and asks: what the verb would refuse is refused before there is a
    service."""
    from swarmcli.cli import main, peers

    kinds = {"trainer": peers.JoinOptions, "auxiliary": peers.PeerOptions, "monitor": peers.MonitorOptions}
    quiet = err.quiet
    typed = main.load(VERBS[role]).make_context(f"swarm {VERBS[role]}", list(words)).params
    err.quiet = quiet  # `-q` after the dashes is the service's
    return kinds[role](**typed).agreed(role, typed.get("nproc"))


@app.command()
def remove(name: ServiceName = None) -> None:
    """End a service and forget it. What its peer has learned and given stays in its directory.

    \b
    swarm service remove
    """
    system = manager()
    name = _one(system, name)
    err.print("its peer hands in what it has computed, and leaves; that may take a minute")
    try:
        system.stop(name)
    finally:
        system.file(name).unlink(missing_ok=True)
    err.print(f"the service {name} is gone")


@app.command()
def status(
    name: ServiceName = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per service.")] = False,
) -> None:
    """Show the services of this user, and whether they run. The exit code is 1 if one of them does not.

    \b
    swarm service status
    swarm service status --json
    """
    system = manager()
    names = [name] if name else installed(system)
    found: list[dict[str, Any]] = []
    for each in names:
        if not system.file(each).exists():
            raise UsageError(f"there is no service {each}; there are: {', '.join(installed(system)) or 'none'}")
        running, state = system.look(each)
        hint = system.hint() if running else ""
        found.append({"name": each, "running": running, "state": state, "file": str(system.file(each)), "hint": hint})
        if as_json:
            out.print(json.dumps(found[-1]), soft_wrap=True)
            continue
        out.print(f"{each}: {'runs' if running else f'does not run ({state})'}")
        if hint:
            err.print(f"  {hint}", soft_wrap=True)
    if not found:
        err.print("no service is installed; `swarm service install LINK` makes one")
    if not all(each["running"] for each in found):
        raise typer.Exit(1)


def installed(system: Manager) -> list[str]:
    """Returns the names of this user's services."""
    pattern = system.file("*")
    before, after = pattern.name.split("*")
    files = sorted(pattern.parent.glob(pattern.name)) if pattern.parent.is_dir() else []
    return [file.name.removeprefix(before).removesuffix(after) for file in files]


def _one(system: Manager, name: str | None) -> str:
    names = installed(system)
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return name
    if not names:
        raise UsageError("no service is installed")
    raise UsageError(f"name one of the services: {', '.join(names)}")


def _environment() -> dict[str, str]:
    """Returns the variables that make this shell's `swarm` what it is. A manager starts services without them."""
    secret = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
    kept = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON) and not secret.search(key)}
    # A session's own variables end with it.
    return {key: value for key, value in kept.items() if not key.startswith(("XDG_SESSION", "XDG_RUNTIME", "XDG_SEAT"))}


def _write(file: Path, text: str) -> None:
    """Writes a file for its user alone: a link in it may hold an invitation."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text.encode(ENCODING), private=True)
    except OSError as error:
        raise SwarmError(f"{file} cannot be written: {error.strerror}") from error
