#!/bin/bash
# Makes homes.tar.xz: what peers of an open and of a closed run leave behind, with the user's configuration, as the
# swarm of $1 (a Python that has it; those kept here: 26d1bc3) writes it. Checkpoints are left out.
set -eu
swarm="$1 -m swarmcli" here=$(cd "$(dirname "$0")" && pwd) work=/tmp/homes
mkdir "$work" && cd "$work"
export SWARM_DATA_DIR=$work/data SWARM_RUNTIME_DIR=$work/runtime SWARM_CONFIG=$work/config.yaml OMP_NUM_THREADS=1
printf 'name: Ada\nlimits:\n  upload: 5 MB/s\n  processor: 50%%\n' > config.yaml

recipe() {
    printf 'run_id: %s\nbase_model: {model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16}\n' "$1"
    printf 'datasets: [{source: stdlib}]\nsequence_len: 16\ntarget_batch_size: 64\nmax_epochs: %s\n' "$2"
}
play() {  # RECIPE RUN: a monitor, a trainer beside it, and one that joins by a link
    local monitor="runs/$2/monitor-1"
    $swarm monitor "$1" --host 127.0.0.1 --port 0 --web 0 --plain --leave-when-done &
    while [ ! -f "$monitor/peer.json" ]; do sleep 0.2; done
    local contact link
    contact=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["addresses"][0])' "$monitor/peer.json")
    link=$($swarm link "$monitor" --copyable)
    if [ "$2" = lab ]; then
        link=$($swarm invite "$1" --note Bob --copyable)
        $swarm invite "$1" --note Eve && $swarm revoke "$1" Eve
    fi
    $swarm join "$link" --yes --host 127.0.0.1 --plain --name Bob &
    $swarm join "$1" --peer "$contact" --host 127.0.0.1 --plain &
    wait
}

recipe small 12 > small.yaml
play small.yaml small
$swarm init --invite lab.yaml --yes
{ recipe lab 6; grep -E '^(access|run_key):' lab.yaml; } > closed.yaml && mv closed.yaml lab.yaml
play lab.yaml lab
tar --exclude=checkpoints --exclude=runtime --sort=name --owner=0 --group=0 -cJf "$here/homes.tar.xz" .
cd / && rm -r "$work"
