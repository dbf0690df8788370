"""Colours that can be read: the contrast that WCAG 2.2 asks of text (AA, 4.5 : 1) and of signs (3 : 1), in
both colour schemes."""

from __future__ import annotations

import re

import pytest

from coordinator_web.pages import STATIC

TEXT_ON_GROUND = {
    "card": ("ink", "soft", "accent", "warn", "bad"),
    "paper": ("ink", "soft", "accent"),
    "faint": ("ink", "soft"),
    "ink": ("paper",),
    "accent": ("on-accent",),
    "accent-soft": ("accent",),
    "good-soft": ("good",),
    "warn-soft": ("warn",),
    "bad-soft": ("bad",),
}
SIGNS = ("edge", "accent", "soft", "good", "warn", "bad")  # on a card


def schemes() -> dict[str, dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", (STATIC / "style.css").read_text(), re.DOTALL)[:2]
    colours = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in (light, dark)]
    return {"light": colours[0], "dark": {**colours[0], **colours[1]}}


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(scheme: str, one: str, other: str) -> float:
    """As WCAG counts it, from 1 to 21."""
    colours = schemes()[scheme]
    lighter, darker = sorted((luminance(colours[one]), luminance(colours[other])), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_signs_stand_out_from_their_grounds(scheme: str) -> None:
    pairs = [(text, ground) for ground, texts in TEXT_ON_GROUND.items() for text in texts]
    assert [pair for pair in pairs if contrast(scheme, *pair) < 4.5] == []
    assert [sign for sign in SIGNS if contrast(scheme, sign, "card") < 3] == []


def test_every_colour_of_a_text_is_one_of_those_that_were_compared() -> None:
    used = set(re.findall(r"[; {](?:color|fill): var\(--([\w-]+)\)", (STATIC / "style.css").read_text()))
    assert used <= {text for texts in TEXT_ON_GROUND.values() for text in texts}


def test_every_value_of_a_page_is_written_by_a_function_that_there_is() -> None:
    """One name that is missing stops the whole page."""
    named = {each for page in STATIC.glob("*.html") for each in re.findall(r'data-of="\S+ (\w+)"', page.read_text())}
    assert named and named <= set(re.findall(r"export function (\w+)", (STATIC / "format.js").read_text()))
