"""One after the other, in segments."""

from nexar.collectives.schedules import chain


def test_a_rank_passes_a_segment_on_while_it_receives_the_next():
    first, *middle, last = chain.broadcast(2, 4, 50, root=0, segment=10)
    assert not first.sends
    assert not last.receives
    for before, step in zip([first, *middle], middle, strict=False):
        assert step.sends[0].part == before.receives[0].part
        assert step.receives[0].part.start == step.sends[0].part.stop


def test_the_chain_goes_up_from_the_root_and_round():
    assert next(chain.broadcast(0, 4, 5, root=3)).receives[0].peer == 3
    assert not any(step.sends for step in chain.broadcast(2, 4, 5, root=3))


def test_what_an_exclusive_scan_passes_on_has_the_rank_s_own_in_it():
    _, first, second, *_ = chain.exclusive_scan(1, 3, 20, segment=10)
    assert first.then[0].into == second.sends[0].part
