"""Boards, as a seed would show them."""

from typing import Any

from nexar.wire.bulletin import Board, Bulletin, Late, Row, State, Traffic


def bulletin(rank: int, **facts: Any) -> Bulletin:
    return Bulletin(**{"rank": rank, "epoch": 1, "pid": 100 + rank, "host": "ann", **facts})


def row(rank: int, state: State = "running", *, heard: float | None = 0.0, **facts: Any) -> Row:
    return Row(rank + 1, rank, state, "host-id", heard=heard, bulletin=bulletin(rank, **facts))


def board(*rows: Row, **facts: Any) -> Board:
    return Board(**{"cluster": "c", "size": len(rows), "joined": len(rows), "epoch": 1, "rows": rows, **facts})


HOSTILE = "<img src=x onerror=alert(1)>[red]"
"""What a member may call its host."""


def busy(*, lost: bool = False) -> Board:
    """Four ranks: 1 computes and keeps the others waiting."""
    late = (Late(1, 0.02, 0.1, 9, 0.9), Late(0, 0.001, 0.002, 1, 0.1))
    peers = (Traffic(2, "shm", 10, 20), Traffic(3, "quic+tls", 1, 2))
    waiting = {"operation": "all_reduce #7", "began": 2.5, "moved": 2.5, "waiting_for": (1,), "late": late}
    last = Row(4, 3, "lost", "host-id", cause="was killed by SIGKILL", gone=1.5) if lost else row(3, **waiting)
    return board(
        row(0, "waiting", **waiting, peers=peers),
        row(1, finished="all_reduce #6", late=late),
        row(2, "waiting", **waiting, host=HOSTILE),
        last,
    )
