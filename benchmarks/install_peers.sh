#!/bin/sh
# Makes the virtual environment with the software that the benchmarks compare with: install_peers.sh DIRECTORY [PYTHON]
set -eu
venv=$1
python=${2:-python3}
here=$(dirname "$0")

"$python" -m venv "$venv"
pip() { "$venv/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch -c "$here/../constraints.txt"
pip install -r "$here/peers-requirements.txt"
"$venv/bin/python" -c 'import hivemind; print("hivemind", hivemind.__version__, "is ready in", "'"$venv"'")'
