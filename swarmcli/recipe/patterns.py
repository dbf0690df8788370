"""Patterns for names of the Hugging Face Hub and of files, and a check of regular expressions that strangers wrote and
this computer matches."""

from __future__ import annotations

import re

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"  # a part of a name of the Hub, or of a file, that hides nothing
ON_HUB = re.compile(f"{NAME}/{NAME}")  # owner/name
# The Hub's pages of these names are no owners of models; `models/NAME` is how links name a directory.
MODEL_ON_HUB = re.compile(f"(?!(models|datasets|spaces)/){NAME}/{NAME}")
MOST_CHARACTERS = 200
# With n of these in a pattern, matching a name of length L may take about L^n tries.
MOST_CHOICES = 4  # | the most of * + ? { | in a pattern


def check_pattern(pattern: str) -> str:
    """Returns the pattern, if it is matched quickly: a volunteer who joins by a link matches a stranger's patterns, and
    some would take years. Raises ValueError with the fix."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r:.80} is no regular expression ({error})") from None
    if "(?" in pattern:  # flags could hide a repetition from the checks below
        raise ValueError(
            f"{pattern!r:.80} has (? in it, which is not taken here; write it without flags and looks ahead"
        )
    choices = len(re.findall(r"[*+?{|]", pattern))
    if len(pattern) > MOST_CHARACTERS or choices > MOST_CHOICES or re.search(r"\)[*+?{]", pattern):
        raise ValueError(
            f"{pattern!r:.80} may take too long to match; write several, each with at most {MOST_CHARACTERS} "
            f"characters and {MOST_CHOICES} of * + ? {{ |, none of them after a )"
        )
    return pattern
