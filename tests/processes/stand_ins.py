"""A seed and a communicator that are not there, for the parts of launching that only start and stop processes."""

import os
import sys
import threading
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from nexar.errors import FormationTimeout, UsageError
from nexar.security.invitation import Invitation, format_ticket

TICKET = format_ticket(Invitation(("127.0.0.1:4000",), bytes(range(32)), bytes(32)))


class Closing:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class StandInSeed(Closing):
    """Forms when the file `formed` appears in its working directory, is empty when `empty` does."""

    def __init__(self, listen: str | None, size: int, **settings: object) -> None:
        if listen == ":1":
            raise UsageError("port 1 is taken")
        self.ticket, self.address = TICKET, "127.0.0.1:4000"

    def wait_formed(self, timeout: float | None = None) -> None:
        if not _appears("formed", timeout or 30):
            raise FormationTimeout(joined=[], expected=2, refused={}, timeout=timeout or 30)

    def wait_empty(self) -> None:
        _appears("empty", 30)


class StandInCommunicator(Closing):
    def __init__(self, invitation: Invitation, facts: dict[str, Any]) -> None:
        self.invitation, self.facts, self.rank, self.size = invitation, facts, facts["rank"], facts["size"]


def stand_in_bootstrap(config: object, invitation: Invitation, **facts: Any) -> StandInCommunicator:
    return StandInCommunicator(invitation, {"config": config, **facts})


def module(name: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    return made


SEED = module("nexar.cluster.seed", SeedService=StandInSeed)
BOOTSTRAP = module("nexar.communicator.bootstrap", bootstrap=stand_in_bootstrap)


def take_places() -> None:
    for stand_in in (SEED, BOOTSTRAP):
        sys.modules[stand_in.__name__] = stand_in


def _appears(name: str, timeout: float) -> bool:
    path, never = Path(os.environ.get("STAND_IN_FOLDER", ".")) / name, threading.Event()
    for _ in range(int(timeout * 100)):
        if path.exists():
            return True
        never.wait(0.01)
    return False


if __name__ == "__main__":
    take_places()
    from nexar.launch.seed_main import main

    sys.exit(main())
