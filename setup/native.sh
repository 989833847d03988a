#!/usr/bin/env bash
# Build nexar-native from ./native into the virtual environment if there is a Rust toolchain and the sources changed.
# A missing toolchain prints a notice, because nexar works without the package; a failed build is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
stamp=$venv/.nexar-native

importable() {
    "$venv/bin/python" -c 'import nexar_native.quic' 2>/dev/null
}

off() {
    echo "QUIC off: $1; TLS, shared memory and in-memory transports work; $2"
    exit 0
}

# Remove the package under its former name from older environments.
if compgen -G "$venv/lib*/python*/site-packages/nexar_quic-*.dist-info" >/dev/null; then
    "$venv/bin/python" -m pip uninstall --disable-pip-version-check --yes --quiet nexar-quic
    rm -f "$venv/.nexar-quic"
fi

[ -f native/pyproject.toml ] || off "native/ holds no package to build" "nothing to be done"
if ! command -v cargo >/dev/null; then
    if importable; then exit 0; fi # a wheel was installed
    off "no cargo on PATH" "install Rust from your distribution or rustup and run make setup again"
fi
# rustup puts a cargo on the PATH before it has a toolchain. It does not run, but says what to do.
if ! version=$(cargo --version 2>&1); then
    if importable; then exit 0; fi
    off "cargo does not run ($(head -n 1 <<<"$version"))" "install a toolchain, with rustup: rustup default stable, and run make setup again"
fi

# Contents, not times: a checkout must not cause a build. Tests are not part of the build.
sources() {
    find native -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.lock' -o -name '*.py' -o -name '*.pyi' -o -name 'py.typed' \) \
        -not -path 'native/target/*' -not -path 'native/tests/*' | LC_ALL=C sort
}
# The checksum includes names: a file may move without a change of its contents.
wanted=$({ echo "$version"; sources; sources | tr '\n' '\0' | xargs -0 cat; } | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && importable; then exit 0; fi

echo "setup: building nexar-native with $version (a first build takes a minute or two)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The environment's maturin has a locked version; Cargo.lock locks the crates (see native/pyproject.toml).
bin=$(cd "$venv/bin" && pwd)
if ! PATH=$bin:$PATH "$venv/bin/python" -m pip install --disable-pip-version-check --force-reinstall --no-deps \
    --no-build-isolation ./native >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    echo "setup: nexar-native did not build (the reason is above). cargo is there, so this is an error, not a missing toolchain." >&2
    echo "setup: to go on without the native package, run with NO_NATIVE=1." >&2
    exit 1
fi
printf '%s\n' "$wanted" >"$stamp"
echo "setup: QUIC on: nexar-native $("$venv/bin/python" -c 'import nexar_native; print(nexar_native.__version__)')"
