#!/usr/bin/env bash
# Install the system packages that some tests use: tools for network namespaces, and a browser. Only those tests need them,
# so no failure here is fatal. Prints what it installs; NO_SYSTEM_PACKAGES=1 installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=${VENV:-.venv}/.nexar-system
export PATH=$PATH:/usr/sbin:/sbin

have() { command -v "$1" >/dev/null; }
network="" browser=""
have ip && have tc || network="$network iproute2"
have nft || network="$network nftables"
have ethtool || network="$network ethtool"
have chromium || have chromium-browser || have google-chrome || browser="$browser chromium"
have chromedriver || browser="$browser chromium-driver"
missing=$network$browser
[ -n "$missing" ] || exit 0
[ "$(cat "$stamp" 2>/dev/null)" != "$missing ${NO_SYSTEM_PACKAGES:-}" ] || exit 0 # reported or tried before
printf '%s\n' "$missing ${NO_SYSTEM_PACKAGES:-}" >"$stamp"

skip() {
    echo "setup: missing$missing ($1); tests that need them (network namespaces, the page in a browser) will skip"
    exit 0
}

[ -z "${NO_SYSTEM_PACKAGES:-}" ] || skip "NO_SYSTEM_PACKAGES is set"
[ -f /etc/debian_version ] && have apt-get || skip "not Debian: install them with your package manager"
[ "$(id -u)" = 0 ] || skip "not root: apt-get install$missing"

echo "setup: installing these system packages with apt-get:$missing (NO_SYSTEM_PACKAGES=1 leaves the system alone)"
export DEBIAN_FRONTEND=noninteractive
# Separately, so that one missing package (Ubuntu has no chromium for apt-get) does not prevent the others.
# shellcheck disable=SC2086  # one word per package
install() { apt-get -qq install --yes --no-install-recommends $1 >/dev/null 2>&1 || echo "setup: apt-get could not install$1"; }
apt-get -qq update >/dev/null 2>&1 || skip "apt-get update failed"
[ -z "$network" ] || install "$network"
[ -z "$browser" ] || install "$browser"
