#!/bin/sh
# Sees to it that the tests marked `homes` find what makes routers: nft, ip, tc and the tools for namespaces; installed
# from Debian where they are missing and this user may. Where that is not possible, or where the system permits no
# namespaces, it names the tests that will not run, and does not fail.
set -u

why() {
    "${PYTHON:-python3}" -c 'from benchmarks._homes import missing; print(missing() or "")'
}

[ -z "$(why)" ] && exit 0

tried=""
if ! { command -v nft && command -v ip && command -v tc; } >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "no nftables found; installing Debian's for the tests of homes behind routers" >&2
        log=$(mktemp)
        trap 'rm -f "$log"' EXIT
        export DEBIAN_FRONTEND=noninteractive
        { apt-get update && apt-get install -y --no-install-recommends nftables iproute2; } >"$log" 2>&1
        [ -z "$(why)" ] && exit 0
        tail -n 5 "$log" >&2
        tried=" Installing Debian's did not help (above)."
    else
        tried=" Only root may install it with apt-get."
    fi
fi

{
    echo "########################################################################"
    echo "# No homes behind routers here: $(why).$tried"
    echo "# THESE TESTS WILL NOT RUN:"
    "${PYTHON:-python3}" -m pytest --collect-only -q -m homes tests 2>/dev/null | grep '::' | sed 's/^/#   /'
    echo "########################################################################"
} >&2
