"""A device of another package: its adapter is found by its entry point when the first of its arrays comes."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import nexar
from nexar.arrays import devices
from nexar.arrays.devices import DeviceRegistry
from nexar.arrays.operand import adapt
from nexar.errors import UsageError
from tests.packages.installing import install, install_broken
from tests.ranks import on_every


@pytest.fixture(autouse=True)
def adapters(monkeypatch: pytest.MonkeyPatch) -> DeviceRegistry:
    """Those of a process that has just begun."""
    adapters = DeviceRegistry()
    monkeypatch.setattr("nexar.arrays.operand.ADAPTERS", adapters)
    return adapters


def test_a_verb_takes_arrays_of_a_package_that_nobody_registered(site: Path) -> None:
    install("slate", site)
    assert "nexar_slate" not in sys.modules
    theirs = importlib.import_module("nexar_slate")
    with nexar.local(2) as ranks:
        given = [theirs.Slate(np.full(5, rank + 1.0), theirs.Engine()) for rank in range(2)]
        assert on_every(ranks, lambda comm: comm.all_reduce(given[comm.rank])) == given
        assert [each.values().tolist() for each in given] == [[3.0] * 5] * 2


def test_arrays_that_are_known_load_no_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("slate", site)
    for known in (np.ones(2), [1.0][0], 3, bytearray(4), np.float32(1), memoryview(b"abc")):
        adapt(known)
    assert "nexar_slate" not in sys.modules


def test_a_package_that_cannot_be_loaded_is_named_and_the_others_serve(site: Path) -> None:
    install("slate", site)
    install_broken("nexar-chipped", devices.GROUP, "chipped", site)
    theirs = importlib.import_module("nexar_slate")
    assert adapt(theirs.Slate([1.0])).array.tolist() == [1.0]
    with pytest.raises(
        UsageError,
        match=r"the device adapter 'chipped' of the package 'nexar-chipped' could not be loaded \(ModuleNotFound",
    ):
        adapt(object())
