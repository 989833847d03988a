"""Who knows which device arrays; packages are looked through once, when one comes that nobody knows."""

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from nexar.arrays import registration
from nexar.arrays.registration import Registration
from nexar.errors import DeviceError, UsageError
from tests.packages.slate.nexar_slate import Slate, SlateAdapter

SLATE = "tests.packages.slate.nexar_slate:SlateAdapter"


class Installed:
    """What packages say, and how often they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **adapters: str) -> None:
        self.asked = 0
        self._points = [EntryPoint(name, value, registration.GROUP) for name, value in adapters.items()]
        monkeypatch.setattr("importlib.metadata.entry_points", self._entry_points)

    def _entry_points(self, *, group: str) -> list[EntryPoint]:
        self.asked += 1
        assert group == "nexar.device_adapters"
        return self._points


def test_packages_are_asked_when_an_array_comes_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    installed, adapters = Installed(monkeypatch, slate=SLATE), Registration()
    assert installed.asked == 0
    found = adapters.find(Slate([1]))
    assert found is not None
    assert found.adapter.name == "slate"
    assert adapters.find(Slate([2])) is found
    assert adapters.find(object()) is None
    assert installed.asked == 1


def test_one_that_was_registered_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed, adapters = Installed(monkeypatch), Registration()
    adapters.add(SlateAdapter())
    assert adapters.find(Slate([1])) is not None
    assert installed.asked == 0


def test_what_is_no_adapter_is_refused() -> None:
    with pytest.raises(UsageError, match="is no nexar"):
        Registration().add(SlateAdapter)  # type: ignore[arg-type]

    class Nameless(SlateAdapter):
        name = None  # type: ignore[assignment]

    with pytest.raises(UsageError, match="has no name"):
        Registration().add(Nameless())


@pytest.mark.parametrize(
    ("value", "why"),
    [("nowhere_at_all:X", "ModuleNotFoundError"), ("math:nothing", "AttributeError"), ("math:pi", "TypeError"),
     ("sys:exit", "SystemExit"), ("collections:OrderedDict", "UsageError")],
)  # fmt: skip
def test_a_broken_package_is_named_and_disturbs_no_other(monkeypatch: pytest.MonkeyPatch, value: str, why: str) -> None:
    installed, adapters = Installed(monkeypatch, broken=value, slate=SLATE), Registration()
    assert adapters.find(Slate([1])) is not None
    for _ in range(2):
        with pytest.raises(
            UsageError,
            match=f"nobody here knows arrays of type object, and the device adapter 'broken' of the package that has "
            rf"'{value}' could not be loaded \({why}: .*\); repair or uninstall that package",
        ):
            adapters.find(object())
    assert installed.asked == 1


def test_an_adapter_that_fails_when_it_is_asked_is_named() -> None:
    class Torn(SlateAdapter):
        name = "torn"

        def recognises(self, value: object) -> bool:
            raise RuntimeError("no driver")

    adapters = Registration()
    adapters.add(Torn())
    with pytest.raises(DeviceError, match="recognising an array on device torn failed: RuntimeError: no driver"):
        adapters.find(object())


def test_only_adapters_that_were_used_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    Installed(monkeypatch)
    adapters: Any = Registration()
    adapters.add(SlateAdapter())
    assert adapters.stats() == {}
    adapters.find(Slate([1.0])).mirror(Slate([1.0])).read()
    assert adapters.stats()["slate"].misses == 1
