#!/usr/bin/env bash
# Install torch into an existing environment:  VENV=.venv-torch TORCH=2.15.0 setup/torch.sh
# PyPI's torch for x86-64 Linux requires several gigabytes of CUDA libraries, which the CPU does not use: stubs replace them
# unless TORCH_CUDA=1. Does nothing if nothing has changed.
# The dependencies of torch (setup/requirements/torch.txt) and its default version (torch_wheel.txt) are locked with hashes.
# Other versions, and the CUDA libraries, are fetched without a hash.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$VENV
torch=$TORCH
stamp=$venv/.nexar-torch

whole() { [ "${TORCH_CUDA:-}" = 1 ] || [ "$(uname -sm)" != "Linux x86_64" ] || ! command -v gcc >/dev/null || ! command -v nm >/dev/null; }
locked=setup/requirements/torch.txt
if whole; then wanted="$torch whole"; else wanted="$torch without CUDA"; fi
wheel=setup/requirements/torch_wheel.txt
wanted="$wanted $(cat $locked $wheel | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

echo "setup: installing torch $wanted into $venv (a gigabyte is fetched)"
fetch() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" && return
    echo "setup: torch $torch for $("$venv/bin/python" --version) on $(uname -sm) could not be installed into $venv (see above)." \
        "It comes from PyPI, or from where pip is told to look, and takes two gigabytes of disk. Only the tests of the" \
        "torch backend need it: make test does without." >&2
    exit 1
}
fetch --require-hashes --only-binary :all: --requirement $locked
if grep -q "^torch==$torch " $wheel; then
    fetch --no-deps --require-hashes --only-binary :all: --requirement $wheel
else
    fetch --no-deps "torch==$torch"
fi
if whole; then
    fetch "torch==$torch"
else
    setup/absent_cuda.sh "$venv"/lib/python*/site-packages/torch/lib
fi
"$venv/bin/python" -c 'import torch.distributed as d; assert d.is_gloo_available()'
printf '%s\n' "$wanted" >"$stamp"
