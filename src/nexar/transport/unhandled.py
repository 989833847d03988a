"""A message that raises in its handler costs its sender the connection; the log has the traceback."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


def unhandled(whose: str, fault: Exception) -> str:
    """Log that a message of `whose` raised `fault`. Returns the reason for which its connection ends.

    Call it in the `except` block of the boundary that ends the connection, and nowhere else: a message that raises
    costs its sender the connection, and no other peer anything.
    """
    reason = f"its message could not be handled: {type(fault).__name__}: {fault}"
    _log.error("%s loses its connection: %s", whose, reason, exc_info=fault)
    return reason
