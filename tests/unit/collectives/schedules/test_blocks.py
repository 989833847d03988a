"""Where the elements of a rank lie."""

from nexar.arrays.views import Span
from nexar.collectives.schedule import Combine, Range
from nexar.collectives.schedules.blocks import equal, most_tiles, receives, runs, sends, tiles, whole


def test_a_span_without_a_limit_is_one_tile_even_if_it_is_empty():
    assert tiles(Span(3, 3), 0) == tiles(Span(3, 3), 5) == (Span(3, 3),)
    assert tiles(Span(0, 5), 2) == (Span(0, 2), Span(2, 4), Span(4, 5))
    assert most_tiles([Span(0, 5), Span(5, 6)], 2) == 3


def test_neighbouring_blocks_are_joined_and_empty_ones_left_out():
    spans = (*equal(2, 3), Span(6, 6), Span(8, 9))
    assert runs(spans, range(5)) == (Range(0, 0, 6), Range(0, 8, 9))
    assert runs(spans, [2, 0, 1]) == (Range(0, 4, 6), Range(0, 0, 4))


def test_both_ends_of_several_messages_have_the_same_tags():
    parts = [whole(1), whole(2)]
    assert (
        [send.tag for send in sends(1, parts, 5)]
        == [each.tag for each in receives(0, parts, Combine.COPY, 5)]
        == [5, 6]
    )
