"""Errors as a person and as a script should see them."""

from __future__ import annotations

from enum import IntEnum

from swarmcli.errors import AddressError, BootstrapError, FingerprintError, RecipeError, SwarmError


class ExitCode(IntEnum):
    """What the command says to the shell."""

    DONE = 0
    FAILURE = 1
    USAGE = 2  # wrong arguments, or a recipe that cannot be used
    NO_CONTACT = 3  # no first contact could be reached
    REFUSED = 4  # the run refused this peer
    START_AGAIN = 75  # of a process of a site, for its launcher: the site broke, and may live on when started anew
    INTERRUPTED = 130  # Ctrl-C


def exit_code(error: BaseException) -> ExitCode:
    """The exit code that tells a script what kind of failure this was."""
    match error:
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case RecipeError() | AddressError():
            return ExitCode.USAGE
        case BootstrapError():
            return ExitCode.NO_CONTACT
        case FingerprintError():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILURE


def words(error: SwarmError) -> str:
    """What to tell a person; failed first contacts get a line each."""
    if not isinstance(error, BootstrapError) or not error.attempts:
        return str(error)
    lines = [f"{address}: {str(why).removeprefix(f'{address}: ')}" for address, why in error.attempts.items()]
    return "\n  ".join(["no first contact could be reached", *lines])
