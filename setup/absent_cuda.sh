#!/usr/bin/env bash
# Put a stand-in beside torch for each CUDA library that is not installed, so that torch loads on a machine without GPU.
#   setup/absent_cuda.sh .../site-packages/torch/lib
# A stand-in has the names torch links against, under the versions it asks for; calling one stops the program. The CUDA
# runtime itself must be the real one: torch's libraries register their kernels with it as they are loaded.
set -euo pipefail
folder=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --undefined-only "$folder"/libtorch*.so "$folder"/libc10*.so | awk '$1 == "U" { print $2 }' | sort -u >"$work/undefined"

# soname, and a pattern for what it must have: `name@version`, or `name` where the library has no versions
stand_in() {
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
    [ -z "$soname" ] || stand_in "$soname" "@${soname//./\\.}\$"
done
stand_in libnvshmem_host.so.3 '@NVSHMEM$'
stand_in libcufile.so.0 '^cuFile[^@]*$'
stand_in libcusparseLt.so.0 '^cusparseLt[^@]*$'
stand_in libnccl.so.2 '^nccl[^@]*$'

# Those that are only named, and asked nothing of, need no names either.
for library in "$folder"/libtorch*.so; do readelf -d "$library"; done |
    sed -nE 's/.*\(NEEDED\).*\[(libcu.*|libnv.*)\]/\1/p' | sort -u | grep -vE '^libcu(dart|pti)\.' |
    while read -r soname; do
        [ -e "$folder/$soname" ] || gcc -shared -fPIC -x c /dev/null "-Wl,-soname,$soname" -o "$folder/$soname"
    done
