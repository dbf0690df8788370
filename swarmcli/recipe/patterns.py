"""Names as the Hugging Face Hub and file systems have them, and regular expressions of strangers, which this computer
matches."""

from __future__ import annotations

import re

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"  # a part of a name of the Hub, or of a file, that hides nothing
ON_HUB = re.compile(f"{NAME}/{NAME}")  # owner/name
# The first pages of the Hub are no owners of models; `models/NAME` is how links name a directory.
MODEL_ON_HUB = re.compile(f"(?!(models|datasets|spaces)/){NAME}/{NAME}")
MOST_CHARACTERS = 200
# The tries for one name grow with the name's length to the power of these.
MOST_CHOICES = 4  # of * + ? { |


def check_pattern(pattern: str) -> str:
    """The pattern, if it is one that is matched quickly: a volunteer who joins by a link matches those of a stranger,
    and some would take years. Raises ValueError with the fix."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r:.80} is no regular expression ({error})") from None
    if "(?" in pattern:  # flags could hide from the next lines what is repeated
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
