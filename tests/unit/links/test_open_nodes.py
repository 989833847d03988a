from collections.abc import Iterator

import pytest

from nexar.links import process_hooks


class Counted:
    """A node that counts its ends."""

    def __init__(self) -> None:
        self.closings = self.abandonings = 0

    def close(self) -> None:
        self.closings += 1
        process_hooks.node_closed(self)

    def abandon(self) -> None:
        self.abandonings += 1


@pytest.fixture
def node() -> Iterator[Counted]:
    made = Counted()
    process_hooks.node_opened(made)
    yield made
    process_hooks.node_closed(made)


def test_at_exit_open_nodes_are_closed_once(node: Counted) -> None:
    process_hooks._close_all()
    process_hooks._close_all()
    assert node.closings == 1


def test_in_a_forked_child_open_nodes_are_abandoned_and_forgotten(node: Counted) -> None:
    process_hooks._abandon_all()
    process_hooks._close_all()
    assert (node.abandonings, node.closings) == (1, 0)


def test_a_closed_node_is_left_alone(node: Counted) -> None:
    node.close()
    process_hooks.node_closed(node)
    process_hooks._close_all()
    process_hooks._abandon_all()
    assert (node.closings, node.abandonings) == (1, 0)
