#!/usr/bin/env bash
# Report known vulnerabilities of all locked packages. The tools are in .venv-audit; cargo-audit is compiled there the first
# time (some minutes) unless the system has it. Queries the advisory databases over the network.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${AUDIT_VENV:-.venv-audit}
locked=setup/requirements/audit.txt

wanted="$("$python" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)') $(cksum <$locked)"
if [ "$(cat "$venv/.nexar-audit" 2>/dev/null)" != "$wanted" ]; then
    echo "audit: making $venv"
    "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --requirement $locked
    printf '%s\n' "$wanted" >"$venv/.nexar-audit"
fi
bin=$(cd "$venv/bin" && pwd)
export PATH=$PATH:$bin
if ! command -v cargo-audit >/dev/null && command -v cargo >/dev/null; then
    echo "audit: compiling cargo-audit (once, some minutes)"
    cargo install --quiet --locked --root "$venv" cargo-audit || echo "audit: cargo-audit could not be installed"
fi
"$venv/bin/python" setup/audit.py
