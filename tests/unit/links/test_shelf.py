from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from nexar.links.shelf import Shelf


@dataclass(eq=False)
class Thing:
    order: int


KEYS = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))


@given(st.lists(st.tuples(st.sampled_from(["put", "drop_first", "put_back", "remove"]), KEYS)))
def test_a_shelf_is_a_list_for_each_key(steps: list[tuple[str, tuple[int, int, int]]]) -> None:
    shelf: Shelf[Thing] = Shelf()
    model: dict[tuple[int, int, int], list[Thing]] = {}
    for number, (verb, key) in enumerate(steps):
        queue = model.setdefault(key, [])
        if verb == "put":
            thing = Thing(number)
            shelf.put(key, thing)
            queue.append(thing)
        elif verb == "put_back" and queue:
            thing = queue[len(queue) // 2]  # taken from the middle, it comes back to the middle
            assert shelf.remove(key, thing)
            shelf.put(key, thing)
        elif verb == "drop_first" and queue:
            assert shelf.first(key) is queue.pop(0)
            shelf.drop_first(key)
        elif queue:
            thing = queue.pop(len(queue) // 2)
            assert shelf.remove(key, thing)
        else:
            assert not shelf.remove(key, Thing(0))
        assert shelf.first(key) is (queue[0] if queue else None)
        assert len(shelf) == sum(map(len, model.values()))
        assert {k for k, _ in shelf.heads()} == {k for k, q in model.items() if q}


def test_an_empty_shelf_holds_no_trace_of_its_keys() -> None:
    shelf: Shelf[Thing] = Shelf()
    for tag in range(1000):
        shelf.put((1, 2, tag), Thing(tag))
        shelf.put((1, 2, tag), Thing(tag + 1))
        shelf.drop_first((1, 2, tag))
        shelf.drop_first((1, 2, tag))
    assert not shelf.oldest
    assert not shelf._more
