"""Packages installed beside nexar, for as long as a test runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import MakeNode, make_node, pair, run_slow, world

__all__ = ["MakeNode", "make_node", "pair", "run_slow", "world"]


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path, into which packages can be installed."""
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(folder)):
            del sys.modules[name]
