#!/usr/bin/env bash
# What a change must pass before its tests matter. Runs everything and fails at the end, so one round shows all there is.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
status=0

check() {
    printf '+ %s\n' "$*"
    "$@" || status=1
}

check "$bin/ruff" check .
check "$bin/ruff" format --check .
check "$bin/lint-imports" --no-cache
if [ ! -f native/Cargo.toml ]; then
    echo "Rust not checked: native/ holds no crate"
elif cargo --version >/dev/null 2>&1; then
    check cargo fmt --manifest-path native/Cargo.toml --check
    check cargo clippy --quiet --locked --manifest-path native/Cargo.toml --all-targets -- -D warnings
else
    echo "Rust not checked: no cargo on PATH, or none that runs"
fi
check "$bin/python" setup/check_packages.py
exit "$status"
