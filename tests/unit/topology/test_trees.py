"""The laws of spanning trees."""

import pytest

from nexar.topology.neighbors import neighbors
from nexar.topology.routes import route
from nexar.topology.trees import children, parents


@pytest.mark.parametrize("topology", ["full_mesh", "k_regular:2", "k_regular:4", "hypercube"])
def test_a_tree_reaches_everybody_along_neighbours_by_a_shortest_way(topology: str) -> None:
    for size in range(1, 41):
        for root in {0, size // 2, size - 1}:
            above = parents(topology, size, root)
            assert above[root] is None
            for rank in range(size):
                depth, here = 0, rank
                while (parent := above[here]) is not None:
                    assert parent in neighbors(topology, size, here)
                    depth, here = depth + 1, parent
                assert here == root
                assert depth == len(route(topology, size, root, rank) or ()) - 1


def test_children_are_the_other_side_of_parents() -> None:
    for topology in ("k_regular:4", "hypercube"):
        above, below = parents(topology, 21, 5), children(topology, 21, 5)
        pairs = {(parent, child) for parent, each in enumerate(below) for child in each}
        assert pairs == {(parent, child) for child, parent in enumerate(above) if parent is not None}
