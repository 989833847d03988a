"""What ranks left in a directory, one file after the other: also where others have put other things beside it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from nexar.security.storage import open_at_once

WhatT = TypeVar("WhatT")


class Found(NamedTuple, Generic[WhatT]):
    """In a directory."""

    read: tuple[WhatT, ...]
    """In the order of names."""
    unreadable: dict[str, str]
    """Files that are none, by name, and why."""


def read_folder(directory: Path, suffix: str, decode: Callable[[bytes], WhatT], largest_bytes: int) -> Found[WhatT]:
    """All files with this suffix, but not those of directories below. `decode` raises ValueError for what is none."""
    read: list[WhatT] = []
    unreadable: dict[str, str] = {}
    for path in sorted(directory.glob(f"*{suffix}")):
        try:
            read.append(decode(_content(path, largest_bytes)))
        except (OSError, ValueError) as error:
            unreadable[path.name] = str(error)
    return Found(tuple(read), unreadable)


def _content(path: Path, largest_bytes: int) -> bytes:
    with open_at_once(path) as file:
        status = os.fstat(file.fileno())  # of what is open: the name may have another file by now
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > largest_bytes:
            raise ValueError(f"it is larger than {largest_bytes} bytes")
        return file.read()
