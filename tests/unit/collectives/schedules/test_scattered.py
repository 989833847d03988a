"""To or from one rank by way of all."""

from nexar.collectives.schedule import cost
from nexar.collectives.schedules import flat, scattered


def test_nobody_has_to_send_the_vector_many_times():
    assert max(cost(scattered.broadcast(rank, 8, 800, 0)).sent_bytes for rank in range(8)) == 1400
    assert cost(flat.broadcast(0, 8, 800, 0)).sent_bytes == 5600


def test_the_root_receives_what_others_have_reduced():
    for way in (scattered.reduce, scattered.fold):
        *_, last = way(2, 4, 40, 2)
        assert [each.part.count for each in last.receives] == [10, 10, 10]
