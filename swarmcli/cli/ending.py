"""How the command ends: exit codes, errors as a person should read them, Ctrl-C, SIGTERM and a closed terminal."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from swarmcli.errors import (
    AddressError,
    BootstrapError,
    FingerprintError,
    MembershipError,
    NotAMember,
    RecipeError,
    SwarmError,
    UsageError,
)
from swarmcli.files.durable import foreign
from swarmcli.words import printable


class ExitCode(IntEnum):
    """Exit codes."""

    DONE = 0
    FAILURE = 1
    USAGE = 2  # wrong arguments, or a recipe that cannot be used
    NO_CONTACT = 3  # no first contact could be reached
    REFUSED = 4  # the run refused this peer
    START_AGAIN = 75  # of a site's process, for its launcher: the site broke, and may work when it is started again
    INTERRUPTED = 130  # what a shell shows for a command that Ctrl-C ended


def exit_code(error: BaseException) -> ExitCode:
    """Returns the exit code that tells a script what kind of failure this was."""
    match error:
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case RecipeError() | AddressError() | UsageError():
            return ExitCode.USAGE
        case BootstrapError():
            return ExitCode.REFUSED if _no_member(error) else ExitCode.NO_CONTACT
        case FingerprintError() | MembershipError():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILURE


def words(error: SwarmError) -> str:
    """Returns the lines that tell a person of an error; each failed first contact gets one."""
    if not isinstance(error, BootstrapError) or not error.attempts:
        return str(error)
    lines = [
        printable(f"{address}: {str(why).removeprefix(f'{address}: ')}") for address, why in error.attempts.items()
    ]
    if _no_member(error):
        return "\n  ".join(["no first contact takes this peer for a member", *lines])
    said = "\n  ".join(["no first contact could be reached", *lines])
    if all(_is_private(address) for address in error.attempts):
        return said + (
            "\nonly computers in the same home or office can reach these addresses; from outside, ask for "
            "the link of a peer that others can dial (`swarm doctor --network` tells)"
        )
    return said + "\nif they have gone, anybody in the run has another link: `swarm link` prints it there"


def plight(error: BaseException) -> str:
    """Says what this computer refuses to any program of this user, and what helps; "": the error is something else."""
    code, text = getattr(error, "errno", None), str(error).lower()
    for name, what in (("HOME", "home directory"), ("TMPDIR", "temporary directory")):
        if f"determine {what}" in text or f"determine the {what}" in text or f"no usable {what}" in text:
            return f"this user has no {what}; set {name}, or SWARM_DATA_DIR, to a directory that it may write"
    if "can't start new thread" in text or (isinstance(error, OSError) and code == errno.EAGAIN):
        return (
            "this computer lets this user have no further thread; end other programs, or raise the limit (ulimit -u, "
            "the limit of processes of a container, TasksMax of a service)"
        )
    if code in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return "the disk is full; make room where this computer keeps its files, then start the same again"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS) and isinstance(error, OSError) and error.filename:
        file = Path(os.fsdecode(error.filename))
        fix = foreign(file) or (
            "name another directory (--home, output_dir, SWARM_DATA_DIR, HF_HOME, TMPDIR), or give this one to this "
            "user (chown)"
        )
        return f"{file}: {error.strerror}; {fix}"
    return ""


def _no_member(error: BootstrapError) -> bool:
    """Whether contacts answer that this peer is no member: another link would not help then."""
    return any(isinstance(why, NotAMember) for why in error.attempts.values())


def _is_private(address: str) -> bool:
    from swarmcli.network.addresses import Scope, parse_address, scope_of

    try:
        return scope_of(parse_address(address).host) is Scope.LAN
    except AddressError:
        return False


# Windows also has Ctrl-Break, the only one that a process there can send to another.
INTERRUPTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGBREAK") if hasattr(signal, name))
HANGUP = getattr(signal, "SIGHUP", None)  # the terminal's window was closed, or the connection to it broke
SIGNALS = (*INTERRUPTS, signal.SIGTERM)


# seconds: after Ctrl-C, a peer that has just begun to join does not wait longer for peers that do not answer
SOON = 1.0


def end_soon(say: Callable[[], object], code: ExitCode = ExitCode.INTERRUPTED) -> threading.Timer:
    """Ends the process after SOON seconds, with what `say` tells, if it still runs and the timer was not cancelled: for
    a process that has nothing to save. It may be waiting in others' code, which nothing interrupts."""

    def end() -> None:
        say()
        os._exit(code)

    timer = threading.Timer(SOON, end)
    timer.daemon = True
    with suppress(RuntimeError):  # without a thread for the timer, the process ends as quickly as it can
        timer.start()
    return timer


@contextmanager
def interrupted_soon() -> Iterator[None]:
    """Within this block Ctrl-C raises KeyboardInterrupt, SIGTERM and a hangup raise SystemExit, and then the process
    ends after SOON seconds. For the main thread only."""
    timers: list[threading.Timer] = []

    def handle(number: int, frame: FrameType | None) -> None:
        timers.append(end_soon(bool, ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.DONE))
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if number == HANGUP:
            _forget_terminal()
        raise SystemExit(int(ExitCode.DONE))

    numbers = [signal.SIGINT]
    if "RANK" not in os.environ:  # a site's launcher would take that exit for work that is done
        numbers.append(signal.SIGTERM)
        if HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN:  # nohup ignores it, and means it
            numbers.append(HANGUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
        for timer in timers:  # on an error the timer runs on: libraries have work to do at the end of a process
            timer.cancel()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals(
    ask: Callable[[signal.Signals, bool], object],
    *,
    end_process: Callable[[int], object] = os._exit,
) -> Iterator[None]:
    """Within this block the first of the SIGNALS asks to leave, with `ask(number, False)`, and the second asks to
    hurry, with `ask(number, True)`, each in a thread of its own. The third ends the process at once. A hangup counts as
    the first, never as a further one: a shell and the system may both send one.

    For the main thread only (Python gives signals to no other). At the end the earlier handlers are restored.
    """
    came: list[int] = []
    wishes = [SimpleQueue[int | None](), SimpleQueue[int | None]()]

    def wait(nth: int) -> None:
        if (number := wishes[nth].get()) is not None:
            ask(signal.Signals(number), nth > 0)

    def handle(number: int, frame: FrameType | None) -> None:
        if number == HANGUP:
            _forget_terminal()
            if came:
                return
        came.append(number)
        if len(came) > len(wishes):
            end_process(ExitCode.INTERRUPTED)
        else:
            wishes[len(came) - 1].put(number)

    # Threads of their own ask the peer: asking takes locks, and the interrupted main thread may hold one of them. They
    # are started here, since later this computer may have no thread left.
    askers = [threading.Thread(target=wait, args=(nth,), name="ask on signal") for nth in range(len(wishes))]
    for asker in askers:
        asker.start()

    numbers = list(SIGNALS)
    if HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN:  # nohup ignores it, and means it
        numbers.append(HANGUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for wish, asker in zip(wishes, askers, strict=True):
            wish.put(None)
            asker.join()


def _forget_terminal() -> None:
    """Redirects a terminal that is gone: writes to it would fail, and cut the goodbye short. Files and pipes stay."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        try:
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nothing, descriptor)
        except OSError:  # it was closed before
            continue
    os.close(nothing)
