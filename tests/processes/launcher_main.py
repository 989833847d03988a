"""The command `nexar`, in front of a cluster that is not there: what a launcher does with its processes needs none.

The seed and the launcher's line to it are replaced; deaths that are reported go to the file TEST_REPORTS names.
With TEST_FORMED the cluster has formed at once.
"""

import os
import sys
from types import ModuleType, TracebackType
from typing import Self

from nexar.config import Config
from nexar.security.invitation import Invitation, format_ticket, make_secret

REPORTS = os.environ.pop("TEST_REPORTS", None)
FORMED = os.environ.pop("TEST_FORMED", None)


class Context:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        pass


class NoSeed(Context):
    def __init__(self, listen: str | None, size: int, **settings: object) -> None:
        self.ticket = format_ticket(Invitation(("127.0.0.1:4000",), make_secret(), bytes(32)))
        self.address = "127.0.0.1:4000"

    def wait_formed(self, timeout: float | None = None) -> None:
        pass

    def wait_empty(self) -> None:
        pass

    def wait_launchers(self, timeout: float) -> None:
        pass


class NoSession(Context):
    def __init__(
        self,
        invitation: Invitation,
        count: int,
        config: Config,
        first_rank: int | None = None,
        *,
        tell: object = None,
        on_run_failed: object = None,
    ) -> None:
        self.node, self.first_rank, self.size, self.group_rank = 7, first_rank or 0, (first_rank or 0) + count, 0

        self.elastic = config.elastic_enabled
        self.formed = FORMED is not None

    def report_failure(self, rank: int, cause: str, code: int, *, consequence: bool) -> None:
        pass

    def report(self, rank: int, cause: str, *, well: bool = False) -> None:
        if REPORTS:
            with open(REPORTS, "a", encoding="utf-8") as file:
                file.write(f"{rank}{' (well)' if well else ''}: {cause}\n")


def replace(module: str, **names: object) -> None:
    stand_in = ModuleType(module)
    stand_in.__dict__.update(names)
    sys.modules[module] = stand_in


if __name__ == "__main__":
    replace("nexar.cluster.seed", SeedService=NoSeed)
    replace("nexar.cluster.seed_session", LauncherSession=NoSession, ObserverSession=NoSession)
    from nexar.cli.main import main

    main()
