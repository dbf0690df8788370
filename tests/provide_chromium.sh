#!/bin/sh
# Sees to it that the tests marked `browser` find a Chromium: one that is there, else Debian's where this user may
# install it. Where neither is possible it names the tests that will not run, and does not fail.
set -u

for name in "${SWARM_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "no Chromium found; installing Debian's for the tests of the dashboard" >&2
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    export DEBIAN_FRONTEND=noninteractive
    if { apt-get update && apt-get install -y --no-install-recommends chromium; } >"$log" 2>&1 &&
        command -v chromium >/dev/null 2>&1; then
        exit 0
    fi
    tail -n 5 "$log" >&2
    why="and installing Debian's failed (above)"
else
    why="and only root may install one with apt-get"
fi

{
    echo "########################################################################"
    echo "# No Chromium here, $why."
    echo "# Install one, or name one in SWARM_CHROMIUM. THESE TESTS WILL NOT RUN:"
    "${PYTHON:-python3}" -m pytest --collect-only -q -m browser tests 2>/dev/null | grep '::' | sed 's/^/#   /'
    echo "########################################################################"
} >&2
