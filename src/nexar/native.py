"""Access to the native package `nexar_native`: whether it is installed, its version, its submodules.

Only this module imports `nexar_native`, and only on first use: nexar works without it. `from nexar.native import quic`
returns `nexar_native.quic` or raises ImportError.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from nexar_native import exit_watch as exit_watch  # noqa: PLC0414 - marks it as exported for mypy
    from nexar_native import quic as quic  # noqa: PLC0414
    from nexar_native import reduce as reduce  # noqa: PLC0414
    from nexar_native import shm as shm  # noqa: PLC0414

PACKAGE: Final = "nexar-native"  # name of the distribution
RELEASE: Final = "0.2"  # other first two numbers mean another interface
_MODULE: Final = "nexar_native"
_SUBMODULES: Final = frozenset({"exit_watch", "quic", "reduce", "shm"})


def __getattr__(name: str) -> Any:
    """Return a submodule of the package. Raises ImportError if it is missing."""
    if name in _SUBMODULES:
        return getattr(importlib.import_module(_MODULE), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def native_installed() -> bool:
    """Return whether any version of the package is installed. Does not import it."""
    return importlib.util.find_spec(_MODULE) is not None


def native_problem() -> str | None:
    """Return why this process cannot use the package, None if it can. Imports the package."""
    try:
        package = importlib.import_module(_MODULE)
    except ImportError as error:
        return f"the package {PACKAGE} cannot be imported: {error}"
    return version_problem(package.__version__)


def version_problem(version: str) -> str | None:
    """Return why this version of the package cannot be used, None if it can."""
    if version.rpartition(".")[0] == RELEASE:
        return None
    return f"{PACKAGE} {version} is installed, but this nexar needs {RELEASE}; upgrade it (in a clone: make setup)"
