"""Progress bars on standard error, if that is a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.progress import Progress

_READ_INTERVAL: Final = 0.2  # seconds between two readings of the count

Advance = Callable[[str], None]
"""One more is done; names the next."""


@contextmanager
def advancing(what: str, total: int) -> Iterator[Advance]:
    """The bar is drawn only when advanced, so as not to disturb measurements."""
    if not sys.stderr.isatty():
        yield _nothing
        return
    bar = _bar(auto_refresh=False)
    with bar:
        task = bar.add_task(what, total=total)
        bar.refresh()

        def advance(following: str) -> None:
            bar.update(task, advance=1, description=f"{what} {following}".rstrip())
            bar.refresh()

        yield advance


@contextmanager
def counting(what: str, total: int, count: Callable[[], int]) -> Iterator[None]:
    """A thread calls `count` until the block ends."""
    if not sys.stderr.isatty():
        yield
        return
    bar, over = _bar(auto_refresh=False), threading.Event()
    with bar:
        task = bar.add_task(what, total=total)

        def follow() -> None:
            while True:
                bar.update(task, completed=count())
                bar.refresh()
                if over.wait(_READ_INTERVAL):
                    return

        thread = threading.Thread(target=follow, name="nexar-progress-bar", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _bar(**options: Any) -> Progress:
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only a terminal needs it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        **options,
    )


def _nothing(_: str) -> None: ...
