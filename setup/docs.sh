#!/usr/bin/env bash
# Build the documentation site into site/: run the notebooks in a real kernel, then mkdocs with strict checks (navigation,
# links and anchors). The tools are in .venv-docs; nothing is fetched if that is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${DOCS_VENV:-.venv-docs}
locked=setup/requirements/docs.txt

wanted="$("$python" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)') $(cat pyproject.toml $locked | cksum)"
if [ "$(cat "$venv/.nexar-docs" 2>/dev/null)" != "$wanted" ]; then
    echo "docs: making $venv (packages are fetched: about half a minute)"
    "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --requirement $locked
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
    printf '%s\n' "$wanted" >"$venv/.nexar-docs"
fi

"$venv/bin/python" setup/notebooks.py
# Not --quiet: it would also hide warnings from --strict.
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict
echo "docs: site/index.html has $(find site -name index.html | wc -l) pages; to look at it: $venv/bin/mkdocs serve"
