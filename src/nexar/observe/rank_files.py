"""What ranks left in a directory, one file after the other: also where others have put other things beside it.

Which rank of the world a node had, for what tells of the ranks of other communicators. Pure.

People know ranks of the world: logs, launchers and pages have those. A rank of a communicator that came of a split is
another number for the same node, so whatever is shown names nodes by their rank in the world.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from nexar.security.storage import open_nonblocking
from nexar.types import Rank

WhatT = TypeVar("WhatT")


class RankFile(NamedTuple, Generic[WhatT]):
    """In a directory."""

    read: tuple[WhatT, ...]
    """In the order of names."""
    unreadable: dict[str, str]
    """Files that are none, by name, and why."""


def read_rank_files(
    directory: Path, suffix: str, decode: Callable[[bytes], WhatT], largest_bytes: int
) -> RankFile[WhatT]:
    """All files with this suffix, but not those of directories below. `decode` raises ValueError for what is none."""
    read: list[WhatT] = []
    unreadable: dict[str, str] = {}
    for path in sorted(directory.glob(f"*{suffix}")):
        try:
            read.append(decode(_content(path, largest_bytes)))
        except (OSError, ValueError) as error:
            unreadable[path.name] = str(error)
    return RankFile(tuple(read), unreadable)


def _content(path: Path, largest_bytes: int) -> bytes:
    with open_nonblocking(path) as file:
        status = os.fstat(file.fileno())  # of what is open: the name may have another file by now
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > largest_bytes:
            raise ValueError(f"it is larger than {largest_bytes} bytes")
        return file.read()


NodeT = TypeVar("NodeT", bound=Hashable)


class WorldNode(NamedTuple, Generic[NodeT]):
    """One node in one generation of the world."""

    generation: int
    node: NodeT
    rank: Rank


def world_ranks(seen: Iterable[WorldNode[NodeT]], generation: int) -> dict[NodeT, Rank]:
    """By node: its rank in the world at this generation of any communicator, as near as is known. A generation is the
    epoch in which it was made, so what counts is the world's last one up to it; else the first one after it.
    """

    def nearness(each: WorldNode[NodeT]) -> tuple[bool, int]:
        before = each.generation <= generation
        return before, each.generation if before else -each.generation

    return {each.node: each.rank for each in sorted(seen, key=nearness)}
