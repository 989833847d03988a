#!/usr/bin/env bash
# Replace each CUDA library that is not installed by a stub, so that torch loads on a machine without GPU.
#   setup/absent_cuda.sh .../site-packages/torch/lib
# A stub defines the symbols that torch links against, in the versions it needs; calling one stops the program. The CUDA
# runtime itself must be the real one: torch's libraries register their kernels with it when they are loaded.
set -euo pipefail
folder=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --undefined-only "$folder"/libtorch*.so "$folder"/libc10*.so | awk '$1 == "U" { print $2 }' | sort -u >"$work/undefined"

# Arguments: soname, and a pattern of its symbols: `name@version`, or `name` if the library has no versions.
stub() {
    grep -E "$2" "$work/undefined" >"$work/names" || { echo "setup: torch asks nothing of $1" >&2; return 0; }
    sed -E 's/@.*//; s/.*/void &(void) { __builtin_trap(); }/' "$work/names" | sort -u >"$work/library.c"
    local version script=()
    version=$(sed -nE 's/.*@//p' "$work/names" | sort -u)
    if [ -n "$version" ]; then
        echo "$version { global: *; };" >"$work/versions"
        script=("-Wl,--version-script=$work/versions")
    fi
    gcc -shared -fPIC -w "$work/library.c" "-Wl,-soname,$1" ${script[@]+"${script[@]}"} -o "$folder/$1"
}

for library in libcublas.so libcublasLt.so libcudnn.so libcufft.so libcusparse.so libnvrtc.so; do
    soname=$(sed -nE "s/.*@($library\.[0-9]+)\$/\1/p" "$work/undefined" | head -n 1)
    [ -z "$soname" ] || stub "$soname" "@${soname//./\\.}\$"
done
stub libnvshmem_host.so.3 '@NVSHMEM$'
stub libcufile.so.0 '^cuFile[^@]*$'
stub libcusparseLt.so.0 '^cusparseLt[^@]*$'
stub libnccl.so.2 '^nccl[^@]*$'

# Libraries that are needed without any symbol become empty stubs.
for library in "$folder"/libtorch*.so; do readelf -d "$library"; done |
    sed -nE 's/.*\(NEEDED\).*\[(libcu.*|libnv.*)\]/\1/p' | sort -u | grep -vE '^libcu(dart|pti)\.' |
    while read -r soname; do
        [ -e "$folder/$soname" ] || gcc -shared -fPIC -x c /dev/null "-Wl,-soname,$soname" -o "$folder/$soname"
    done
