#!/usr/bin/env bash
# Build nexar-quic from ./quic into the virtual environment, when a Rust toolchain is there and its sources changed.
# An absent toolchain is a notice (nexar works without the package); a build that breaks is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
stamp=$venv/.nexar-quic

off() {
    echo "QUIC off: $1; TLS, shared memory and in-memory transports work; $2"
    exit 0
}

[ -f quic/pyproject.toml ] || off "quic/ holds no package to build" "nothing to be done"
if ! command -v cargo >/dev/null; then
    if "$venv/bin/python" -c 'import nexar_quic' 2>/dev/null; then exit 0; fi # somebody installed a wheel
    off "no cargo on PATH" "install Rust from your distribution or rustup and run make setup again"
fi
# rustup puts a cargo on the PATH before it has a toolchain: that one is as good as none, and says what to do.
if ! version=$(cargo --version 2>&1); then
    if "$venv/bin/python" -c 'import nexar_quic' 2>/dev/null; then exit 0; fi
    off "cargo does not run ($(head -n 1 <<<"$version"))" "install a toolchain, with rustup: rustup default stable, and run make setup again"
fi

# Contents, not times: a checkout or a touched file is not a reason to compile. Tests are not part of the build.
sources() {
    find quic -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.lock' -o -name '*.py' -o -name '*.pyi' -o -name 'py.typed' \) \
        -not -path 'quic/target/*' -not -path 'quic/tests/*' | LC_ALL=C sort
}
wanted=$({ echo "$version"; sources | tr '\n' '\0' | xargs -0 cat; } | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c 'import nexar_quic' 2>/dev/null; then exit 0; fi

echo "setup: building nexar-quic with $version (a first build takes a minute or two)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# With the maturin of the environment, whose version is locked; Cargo.lock locks the crates (see quic/pyproject.toml).
bin=$(cd "$venv/bin" && pwd)
if ! PATH=$bin:$PATH "$venv/bin/python" -m pip install --disable-pip-version-check --force-reinstall --no-deps \
    --no-build-isolation ./quic >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    echo "setup: nexar-quic did not build (the reason is above). cargo is there, so this is a fault, not a missing toolchain." >&2
    echo "setup: to go on without QUIC, run with NO_QUIC=1." >&2
    exit 1
fi
printf '%s\n' "$wanted" >"$stamp"
echo "setup: QUIC on: nexar-quic $("$venv/bin/python" -c 'import nexar_quic; print(nexar_quic.__version__)')"
