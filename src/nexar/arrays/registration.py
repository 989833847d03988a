"""Which device adapters there are: ours, those that somebody registered, and those of installed packages.

A package adds one with an entry point of the group `nexar.device_adapters`: the name is the adapter's, the object a
callable without arguments that returns a `DeviceAdapter`. Packages are looked through, and theirs loaded, when an array
comes that nobody knows yet; a package that cannot be loaded is told of then, by its name, and asked no more.
"""

from __future__ import annotations

import threading
from typing import Final

from nexar.arrays.cuda_adapter import CudaAdapter
from nexar.arrays.device_adapter import DeviceAdapter
from nexar.arrays.staging import Staging, StagingStats
from nexar.errors import UsageError
from nexar.types import describe_package

GROUP: Final = "nexar.device_adapters"


class Registration:
    """The adapters of a process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # while the next line is replaced, whole, so that readers need none
        self._known: tuple[Staging, ...] = (Staging(CudaAdapter()),)
        # While packages are loaded, and over what is below. Another one than for adding: a package that another thread
        # imports at this moment may add its adapter itself, and the thread that loads it waits for that import.
        self._looking = threading.RLock()
        self._broken: list[str] = []
        self._looked = False

    def add(self, adapter: DeviceAdapter) -> None:
        """Know this one too; those known before are asked first. UsageError for what is no adapter, or has no name."""
        if not isinstance(adapter, DeviceAdapter):
            raise UsageError(f"{adapter!r} is no nexar.arrays.device_adapter.DeviceAdapter; give an instance of one")
        if not isinstance(getattr(adapter, "name", None), str):
            raise UsageError(f"{adapter!r} has no name; give its class one, which errors and statistics then say")
        with self._lock:
            self._known = (*self._known, Staging(adapter))

    def find(self, value: object) -> Staging | None:
        """Who knows this array; None: nobody. The first array that nobody knows makes packages load.

        UsageError if nobody knows it and a package could not be loaded, which might have; DeviceError, with the name of
        the adapter, if one raises when it is asked.
        """
        found = self._knows(value)
        if found is not None:
            return found
        with self._looking:
            if not self._looked:
                self._looked = True
                self._look()
            broken = "; ".join(self._broken)
        found = self._knows(value)
        if found is None and broken:
            raise UsageError(f"nobody here knows arrays of type {type(value).__qualname__}, and {broken}")
        return found

    def stats(self) -> dict[str, StagingStats]:
        """By adapter; only those that were used."""
        counted = {each.adapter.name: each.memory.stats() for each in self._known}
        return {name: stats for name, stats in counted.items() if stats.hits or stats.misses}

    def _knows(self, value: object) -> Staging | None:
        return next((each for each in self._known if each.recognises(value)), None)

    def _look(self) -> None:
        """Looking through all that is installed takes long: only who has a strange array does."""
        from importlib.metadata import entry_points  # noqa: PLC0415

        for point in entry_points(group=GROUP):
            try:
                self.add(point.load()())
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the code of a package raises
                self._broken.append(
                    f"the device adapter {point.name!r} of {describe_package(point)} could not be loaded "
                    f"({type(error).__name__}: {error}); repair or uninstall that package"
                )


ADAPTERS: Final = Registration()
"""Of this process."""
