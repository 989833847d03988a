"""The standard streams of a command, which its parent may have closed."""

import os
import sys
from typing import Final

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""By descriptor: the name in `sys`, and the mode."""


def open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed when the interpreter started.

    Otherwise the next file that is opened gets its descriptor: a rank would be given a pipe of the launcher as its
    standard input. Call it before anything else is opened.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            _open_null(descriptor)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _open_null(descriptor: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)
