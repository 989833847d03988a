"""Whether this machine can have the shared-memory transport at all."""

from __future__ import annotations

import os
import platform
import socket
from typing import Final

_TOTAL_STORE_ORDER: Final = frozenset({"x86_64", "AMD64"})


def missing_support() -> str | None:
    """Why not, as a sentence; None if it can. Network carriers serve where it cannot."""
    machine = platform.machine()
    if machine not in _TOTAL_STORE_ORDER:
        return f"the rings need a CPU with total store order (x86-64), this one is {machine}"
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED"):
        return f"memory passed by descriptor needs Linux, this is {platform.system()}"
    return None
