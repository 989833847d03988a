"""Ctrl-C, and verbs to press it in."""

from __future__ import annotations

import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nexar.links.process_hooks import SIGNALS


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def handlers_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever an earlier test has left
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


VERBS = """
def verb(during):
    during()
    return "done"

def nested(during):
    return verb(lambda: verb(during))

def verb_then_wait(during, wait):
    during()
    wait()
    return "done"
"""


def module_with_verbs(name: str) -> Any:
    """A module of that name, with verbs that call what they are given."""
    module = types.ModuleType(name)
    exec(VERBS, module.__dict__)
    return module
