"""How large the process tests are, and how they report what they measured.

The suite proves each line of the contract at a size that two busy cores bear; NEXAR_FULL=1 runs it at the contract's
own size and holds it to the contract's own figures.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from nexar_tools.transports import why_unavailable

T = TypeVar("T")
MIB = 1 << 20
FULL = os.environ.get("NEXAR_FULL", "") not in ("", "0")
Report = Callable[..., None]


def sized(suite: T, full: T) -> T:
    """The value for this run."""
    return full if FULL else suite


def schemes(*names: str) -> pytest.MarkDecorator:
    """Parametrise by transport; those that cannot be used here skip, with the reason. `shm+tls` is both at once."""
    return pytest.mark.parametrize("scheme", [pytest.param(name, marks=_absence(name), id=name) for name in names])


def _absence(name: str) -> list[pytest.MarkDecorator]:
    reasons = [reason for scheme in name.split("+") if (reason := why_unavailable(scheme))]
    return [pytest.mark.skip(reason=reason) for reason in reasons]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """What to report of many durations, in microseconds."""
    return {
        "n": len(seconds),
        "p50_us": round(percentile(seconds, 50) * 1e6, 1),
        "p99_us": round(percentile(seconds, 99) * 1e6, 1),
        "max_us": round(max(seconds) * 1e6, 1),
    }


def measured(record: Callable[[str, object], None], **values: Any) -> None:
    """Say what was measured: in the test's record, and in a line that pytest shows with -s or -rP."""
    for name, value in values.items():
        record(name, value)
    print("measured", *(f"{name}={value}" for name, value in values.items()))  # noqa: T201
