"""Tools for the tests, the benchmarks, `make soak` and `make kill-schedules`: nodes without a cluster, peer processes,
network namespaces, the soak test, kill schedules. They are not part of the wheel.
"""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """The variables of this process, extended so that a child in any folder can import this package."""
    folders = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
