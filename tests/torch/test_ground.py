from nexar.torch.calls import NodeTable, SharedNode


class Stand:
    """In place of a communicator."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_the_last_group_to_end_leaves_the_cluster_whichever_it_is():
    world, part = Stand(), Stand()
    footing = SharedNode(world, world.close)
    footing.enter(world)
    footing.enter(part)
    footing.end(world)
    assert not world.closed, "the part stands on the same node"
    footing.end(part)
    assert part.closed
    assert world.closed


def test_a_group_that_ends_twice_ends_once():
    world, part, left = Stand(), Stand(), []
    footing = SharedNode(world, lambda: left.append(1))
    footing.enter(world)
    footing.enter(part)
    footing.end(part)
    footing.end(part)
    assert left == []
    footing.end(world)
    footing.end(world)
    assert left == [1]
    assert not world.closed, "who leaves says how"


def test_only_the_end_of_the_default_group_is_forgotten():
    ground = NodeTable()
    ground.world, ground.shared_node = world, _ = Stand(), object()
    ground.forget(Stand())
    assert ground.world is world
    ground.forget(world)
    assert ground.world is None
    assert ground.shared_node is None
