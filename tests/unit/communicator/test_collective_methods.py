"""The public methods agree with the table of operations."""

import inspect
from typing import Any

import pytest

from nexar.collectives.operations import COLLECTIVES, Collective, Layout, OperationCode, RootRole
from nexar.communicator.communicator import Communicator
from nexar.communicator.starter import Starter

NOT_STARTED = {OperationCode.SPLIT, OperationCode.CHECKPOINT, OperationCode.GROW}
"""They make or change communicators, so they always block."""


def arguments(row: Collective) -> dict[str, Any]:
    return dict(inspect.signature(getattr(Communicator, row.name)).parameters)


@pytest.mark.parametrize("row", COLLECTIVES.values(), ids=lambda row: row.name)
def test_every_operation_is_a_method_and_can_be_started(row: Collective) -> None:
    assert inspect.getdoc(getattr(Communicator, row.name))
    assert hasattr(Starter, row.name) == (row.code not in NOT_STARTED)


@pytest.mark.parametrize("row", COLLECTIVES.values(), ids=lambda row: row.name)
def test_a_method_has_the_arguments_that_its_row_states(row: Collective) -> None:
    assert ("root" in arguments(row)) == (row.root is not RootRole.NONE)
    assert ("op" in arguments(row)) == (row.operands is not None)
    if row.same_as is None:
        assert ("deterministic" in arguments(row)) == ("commutative" in arguments(row)) == (row.operands is not None)
        assert "algorithm" in arguments(row)
        assert ("array" in arguments(row)) == (row.layout is not Layout.NONE)
        assert "out" in arguments(row) or row.layout in {Layout.NONE, Layout.IN_PLACE}
