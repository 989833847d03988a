#!/usr/bin/env bash
# All steps of `make setup`, under a lock: two runs on one environment would disturb each other.
set -euo pipefail
cd "$(dirname "$0")/.."
export VENV=${VENV:-.venv}
if command -v flock >/dev/null; then
    exec 9<setup # any existing file or folder can be locked
    flock 9
fi
setup/environment.sh
# As pip does for packages that are not editable. Otherwise, where Python may not write bytecode, every rank compiles.
"$VENV/bin/python" -m compileall -q src tools
setup/system.sh
if [ -n "${NO_NATIVE:-}" ]; then
    echo "QUIC off: NO_NATIVE is set; TLS, shared memory and in-memory transports work"
else
    setup/native.sh
fi
