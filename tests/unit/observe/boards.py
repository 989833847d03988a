"""Boards, as a seed would show them."""

from typing import Any

from nexar.wire.status import LateRank, PeerTraffic, State, StatusPage, StatusReport, StatusRow


def bulletin(rank: int, **facts: Any) -> StatusReport:
    return StatusReport(**{"rank": rank, "epoch": 1, "pid": 100 + rank, "host": "ann", **facts})


def row(rank: int, state: State = "running", *, heard: float | None = 0.0, **facts: Any) -> StatusRow:
    return StatusRow(rank + 1, rank, state, "host-id", heard=heard, bulletin=bulletin(rank, **facts))


def board(*rows: StatusRow, **facts: Any) -> StatusPage:
    return StatusPage(**{"cluster": "c", "size": len(rows), "joined": len(rows), "epoch": 1, "rows": rows, **facts})


HOSTILE = "<img src=x onerror=alert(1)>[red]"
"""What a member may call its host."""


def busy(*, lost: bool = False) -> StatusPage:
    """Four ranks: 1 computes and keeps the others waiting."""
    late = (LateRank(1, 0.02, 0.1, 9, 0.9), LateRank(0, 0.001, 0.002, 1, 0.1))
    peers = (PeerTraffic(2, "shm", 10, 20), PeerTraffic(3, "quic+tls", 1, 2))
    waiting = {"operation": "all_reduce #7", "began": 2.5, "moved": 2.5, "waiting_for": (1,), "late": late}
    last = StatusRow(4, 3, "lost", "host-id", cause="was killed by SIGKILL", gone=1.5) if lost else row(3, **waiting)
    return board(
        row(0, "waiting", **waiting, peers=peers),
        row(1, finished="all_reduce #6", late=late),
        row(2, "waiting", **waiting, host=HOSTILE),
        last,
    )
