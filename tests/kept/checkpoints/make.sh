#!/bin/bash
# Makes checkpoint.tar.xz: what a trainer that was alone in its run leaves behind, as the swarm of $1 (a Python that
# has it; that of the one kept here: 26d1bc3) writes it.
set -eu
here=$(cd "$(dirname "$0")" && pwd) work=$(mktemp -d) && cd "$work"
export SWARM_DATA_DIR=$work/data SWARM_RUNTIME_DIR=$work/runtime SWARM_CONFIG=$work/config.yaml OMP_NUM_THREADS=1
cat > recipe.yaml <<RECIPE
run_id: old
base_model: {model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 4, tie_word_embeddings: true}
datasets: [{source: stdlib}]
sequence_len: 8
target_batch_size: 32
max_epochs: 3
ema_decay: 0.9
optimizer: {learning_rate: 0.01}
evaluation: {held_out: 0.01, samples: 4, every_epochs: 3}
RECIPE
"$1" -m swarmcli join recipe.yaml --host 127.0.0.1 --plain
tar -C runs/old/trainer-1/checkpoints --sort=name --owner=0 --group=0 -cJf "$here/checkpoint.tar.xz" epoch-000003
cd / && rm -r "$work"
