"""Calls that the table describes completely."""

from nexar.collectives.operations import COLLECTIVES, Layout
from nexar.collectives.prepared_call import _IN_REGION


def test_operations_in_shared_memory_have_a_method_of_the_region() -> None:
    marked = {row.base_operation for row in COLLECTIVES.values() if row.shared_memory and row.layout is not Layout.NONE}
    assert set(_IN_REGION) == marked
