#!/usr/bin/env bash
# Everything `make setup` does, one at a time: two makes at once on one environment would trip over each other.
set -euo pipefail
cd "$(dirname "$0")/.."
export VENV=${VENV:-.venv}
if command -v flock >/dev/null; then
    exec 9<setup # a folder can be locked, and is there anyway
    flock 9
fi
setup/environment.sh
# As pip does for a package that is not editable: where Python may not write bytecode, every rank would compile anew.
"$VENV/bin/python" -m compileall -q src
setup/system.sh
if [ -n "${NO_NATIVE:-}" ]; then
    echo "QUIC off: NO_NATIVE is set; TLS, shared memory and in-memory transports work"
else
    setup/native.sh
fi
