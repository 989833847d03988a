"""An order to start from."""

from nexar.cli.bench.order import Order

ORDER = Order(
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
