#!/usr/bin/env bash
# Run all static checks. Fails at the end, so that one run shows all errors.
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
