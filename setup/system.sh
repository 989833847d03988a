#!/usr/bin/env bash
# The system tools that tests with real network namespaces use. Only those tests need them, so nothing here is fatal.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=${VENV:-.venv}/.nexar-system
export PATH=$PATH:/usr/sbin:/sbin

missing=""
command -v ip >/dev/null && command -v tc >/dev/null || missing="$missing iproute2"
command -v nft >/dev/null || missing="$missing nftables"
command -v ethtool >/dev/null || missing="$missing ethtool"
[ -n "$missing" ] || exit 0
[ "$(cat "$stamp" 2>/dev/null)" != "$missing" ] || exit 0 # said, or tried in vain, already

skip() {
    echo "setup: missing$missing ($1); tests with network namespaces that need them will skip"
    printf '%s\n' "$missing" >"$stamp"
    exit 0
}

[ -f /etc/debian_version ] && command -v apt-get >/dev/null || skip "not Debian: install them with your package manager"
[ "$(id -u)" = 0 ] || skip "not root: apt-get install$missing"

echo "setup: installing$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # one word per package
{ apt-get -qq update && apt-get -qq install --yes --no-install-recommends $missing; } >/dev/null 2>&1 || skip "apt-get failed"
