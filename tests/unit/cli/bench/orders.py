"""An order to start from."""

from nexar.cli.bench.protocol import BenchOrder

ORDER = BenchOrder(
    measure="all_reduce",
    count=20,
    dtype="float32",
    op="sum",
    root=0,
    algorithm=None,
    warmups=2,
    iterations=3,
    check=True,
)
