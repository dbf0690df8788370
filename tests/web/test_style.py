"""Colours that can be read: the contrast that WCAG 2.2 asks of text (AA, 4.5 : 1), in both colour schemes."""

from __future__ import annotations

import re

import pytest

from coordinator_web.app import STATIC

TEXT_ON_GROUND = [
    ("ink", "card"),
    ("ink", "paper"),
    ("ink", "faint"),
    ("soft", "card"),
    ("soft", "paper"),
    ("soft", "faint"),
    ("accent", "card"),
    ("accent", "paper"),
    ("accent", "accent-soft"),
    ("good", "good-soft"),
    ("warn", "warn-soft"),
    ("warn", "card"),
    ("bad", "bad-soft"),
    ("bad", "card"),
    ("paper", "ink"),
]


def schemes() -> dict[str, dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", (STATIC / "style.css").read_text(), re.DOTALL)[:2]
    colours = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in (light, dark)]
    return {"light": colours[0], "dark": {**colours[0], **colours[1]}}


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), TEXT_ON_GROUND)
def test_text_stands_out_from_its_ground(scheme: str, text: str, ground: str) -> None:
    colours = schemes()[scheme]
    lighter, darker = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5
