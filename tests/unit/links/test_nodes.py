from collections.abc import Iterator

import pytest

from nexar.links import nodes


class Counted:
    """A node that counts its ends."""

    def __init__(self) -> None:
        self.closings = self.abandonings = 0

    def close(self) -> None:
        self.closings += 1
        nodes.closed(self)

    def abandon(self) -> None:
        self.abandonings += 1


@pytest.fixture
def node() -> Iterator[Counted]:
    made = Counted()
    nodes.opened(made)
    yield made
    nodes.closed(made)


def test_at_exit_open_nodes_are_closed_once(node: Counted) -> None:
    nodes._close_all()
    nodes._close_all()
    assert node.closings == 1


def test_in_a_forked_child_open_nodes_are_abandoned_and_forgotten(node: Counted) -> None:
    nodes._abandon_all()
    nodes._close_all()
    assert (node.abandonings, node.closings) == (1, 0)


def test_a_closed_node_is_left_alone(node: Counted) -> None:
    node.close()
    nodes.closed(node)
    nodes._close_all()
    nodes._abandon_all()
    assert (node.closings, node.abandonings) == (1, 0)
