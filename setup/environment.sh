#!/usr/bin/env bash
# Make the virtual environment: nexar, editable, with the development tools locked in setup/requirements/dev.txt.
# Does nothing if pyproject.toml, that file and the interpreter have not changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no interpreter '$python'; nexar needs Python 3.11 or newer (make setup PYTHON=/path/to/python3.11)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "'$python' is $("$python" --version 2>&1); nexar needs Python 3.11 or newer (make setup PYTHON=/path/to/python3.11)"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "'$python' has no venv module; on Debian and Ubuntu: apt-get install python3-venv"

interpreter=$("$python" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')
locked=setup/requirements/dev.txt
wanted="$interpreter $(cat pyproject.toml $locked | cksum)"
stamp=$venv/.nexar-environment
made=$(cat "$stamp" 2>/dev/null || true)
if [ -x "$venv/bin/python" ] && [ "$made" = "$wanted" ]; then exit 0; fi

echo "setup: making $venv with $("$python" --version) (packages are fetched: about half a minute)"
clear=()
# Packages of another interpreter are useless. Only an environment is cleared, never a folder given by mistake.
if [ -f "$venv/pyvenv.cfg" ] && [ "${made#"$interpreter "}" = "$made" ]; then clear=(--clear); fi
"$python" -m venv ${clear[@]+"${clear[@]}"} "$venv"
# Only files with a known hash, and only wheels: building a package would fetch and run code that is not locked.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --requirement $locked
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
printf '%s\n' "$wanted" >"$stamp"
