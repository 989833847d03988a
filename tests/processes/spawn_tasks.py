"""Functions for spawned ranks, in front of a communicator that is not there."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.processes import stand_ins

if "SPAWN_STAND_INS" in os.environ:  # set for the spawned processes alone
    stand_ins.take_places()


def place(communicator: Any) -> tuple[int, int, int]:
    return communicator.rank, communicator.size, os.getpid()


def timeouts(communicator: Any) -> tuple[float, float]:
    config = communicator.facts["config"]
    return config.barrier_timeout, config.rpc_timeout


def fail_on_rank_1(communicator: Any) -> None:
    if communicator.rank == 1:
        raise ValueError("on purpose")
    time.sleep(600)


def die_on_rank_1(communicator: Any) -> None:
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def exit_at_once(communicator: Any) -> None:
    os._exit(4)


def return_what_cannot_be_sent(communicator: Any) -> Any:
    return lambda: None


def say_and_wait(communicator: Any) -> None:
    draft = Path(os.environ["SPAWN_FOLDER"], f"draft{communicator.rank}")
    draft.write_text(str(os.getpid()), encoding="ascii")
    draft.rename(draft.with_name(f"pid{communicator.rank}"))  # whoever sees it sees all of it
    time.sleep(600)
