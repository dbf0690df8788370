#!/bin/sh
# Runs swarm, and starts it again after an end whose cause may pass: a failure, no contact, a signal such as the
# kernel's when memory runs out. An end that would only repeat itself ends the container with swarm's own exit code
# (docs/verbs.md has the table): docker's restart policies cannot tell one code from another.
#
# SWARM_RETRIES  after so many ends in a row, each after less than SWARM_LIVED seconds, the container ends as well
# SWARM_PAUSE    seconds before the first new start; doubled for each that follows, a minute at most
retries=${SWARM_RETRIES:-6} lived=${SWARM_LIVED:-300} first=${SWARM_PAUSE:-2}
child='' stopping='' short=0 pause=$first

stop() {
    stopping=yes
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT

while :; do
    began=$(date +%s)
    swarm "$@" &
    child=$!
    # A signal that is trapped ends `wait` before its time.
    while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done
    child=''
    case $code in 0 | 2 | 4 | 130) exit "$code" ;; esac
    [ -z "$stopping" ] || exit "$code"
    if [ $(($(date +%s) - began)) -ge "$lived" ]; then
        short=0 pause=$first
    fi
    short=$((short + 1))
    if [ "$short" -ge "$retries" ]; then
        echo "swarm ended $short times in a row; it is not started again" >&2
        exit "$code"
    fi
    echo "swarm ended with exit code $code; it starts again in $pause s ($short of $((retries - 1)))" >&2
    sleep "$pause" &
    child=$!
    wait "$child"
    [ -z "$stopping" ] || exit "$code"
    child='' pause=$((pause * 2 > 60 ? 60 : pause * 2))
done
