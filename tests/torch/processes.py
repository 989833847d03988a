"""Ranks of torch as processes, forked from the test so that torch, and what of nexar a rank needs, is imported once."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nexar_tools.transports import why_unavailable

EVENT_TIMEOUT = 50.0
"""Seconds until a test that waits for processes gives up."""


def load() -> None:
    """Import what every rank would import by itself, at ten times the price of all that it does then."""
    module = "process_group" if torch.__version__ < (2, 14) else "backend"
    for name in ("launch.create", "torch.creation", f"torch.{module}"):
        import_module(f"nexar.{name}")
    for scheme in ("shm", "tls", "quic"):
        if not why_unavailable(scheme):
            import_module(f"nexar.transport.{scheme}.transport")


load()


class Died:
    """The answer of a rank that ended without one."""

    def __init__(self, code: int | None) -> None:
        self.code = code


def on_ranks(
    folder: Path, size: int, task: Callable[[int, int], Any], *, backend: str = "nexar", initialise: bool = True
) -> list[Any]:
    """What `task(rank, size)` returns in each of `size` processes, in which the process group is initialised."""
    context = get_context("fork")
    lines, processes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        begin = partial(_initialise, backend, f"file://{folder}/store", rank, size) if initialise else None
        process = context.Process(target=_serve, args=(there, task, rank, size, begin), name=f"rank {rank}")
        process.start()
        there.close()
        lines.append(here)
        processes.append(process)
    answers = [_answer(line) for line in lines]
    for process, answer in zip(processes, answers, strict=True):
        process.join(EVENT_TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        if isinstance(answer, Died):
            answer.code = process.exitcode
        process.close()
    for answer in answers:
        assert not isinstance(answer, _Failed), answer.text
    return answers


class _Failed:
    def __init__(self, text: str) -> None:
        self.text = text


def _answer(line: Connection) -> Any:
    with line:
        try:
            return line.recv() if line.poll(EVENT_TIMEOUT) else _Failed("no answer in time")
        except EOFError:
            return Died(None)


def _initialise(backend: str, store: str, rank: int, size: int) -> None:
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=EVENT_TIMEOUT)
    )


def _serve(
    line: Connection, task: Callable[[int, int], Any], rank: int, size: int, begin: Callable[[], None] | None
) -> None:
    torch.set_num_threads(1)
    try:
        if begin is not None:
            begin()
        line.send(task(rank, size))
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:  # noqa: BLE001  # the test shows it
        line.send(_Failed(f"rank {rank}:\n{traceback.format_exc()}"))
        os._exit(1)
    line.close()
    os._exit(0)
