"""Takes the picture of the dashboard that the README shows, from a run that is going on.

    python docs/screenshot.py http://127.0.0.1:8080/ docs/dashboard.png --epoch 10

It waits until the page shows that epoch, so that there is something to see. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Without these Chromium asks its maker's hosts for updates and components at every start.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def main() -> int:
    options = _arguments()
    chromium = os.environ.get("SWARM_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if chromium is None:
        sys.stderr.write("no Chromium found; install one, or name one in SWARM_CHROMIUM\n")
        return 1
    take(options, chromium)
    sys.stderr.write(f"{options.picture}\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Take a picture of a running dashboard.")
    parser.add_argument("url", help="where the dashboard is, with its token if it has one")
    parser.add_argument("picture", type=Path, help="the PNG file to write")
    parser.add_argument("--epoch", type=int, default=0, help="wait until the run is at this epoch")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for it")
    parser.add_argument("--width", type=int, default=1200, help="of the window, in pixels")
    parser.add_argument("--height", type=int, default=0, help="of the picture; 0: the whole page")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--scale", type=float, default=1.0, help="device pixels per pixel")
    return parser.parse_args()


def take(options: argparse.Namespace, chromium: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height or 900},
            color_scheme=options.scheme,
            device_scale_factor=options.scale,
            reduced_motion="reduce",
        )
        page.goto(options.url)
        page.wait_for_selector('body[data-connection="live"]')
        page.wait_for_function(
            "epoch => Number(document.getElementById('epoch').textContent.replaceAll(',', '')) >= epoch",
            arg=options.epoch,
            timeout=options.timeout * 1000,
        )
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=options.picture, full_page=not options.height)
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
