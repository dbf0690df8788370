"""How many files and sockets this process may have open."""

from __future__ import annotations

import sys

try:
    import resource
except ImportError:  # Windows has no such bound on sockets
    resource = None  # type: ignore[assignment]


def allow_descriptors(wanted: int) -> int:
    """Raises the soft limit of this process to `wanted`, as far as the hard one permits; how many it may have then."""
    if resource is None:
        return sys.maxsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return max(soft, allowed)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # macOS names a hard limit that it does not grant
        return soft
    return allowed
