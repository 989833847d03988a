"""What a node tells the seed of itself, on the line that it has to it anyway."""

import itertools
import threading
from collections.abc import Iterator

import pytest

from nexar.cluster import standing as module
from nexar.wire.bulletin import Bulletin, decode_bulletin
from nexar.wire.joining import AreYouThere, Here, News, Word, encode_join
from nexar.wire.messages import Ping
from tests.ranks import PATIENCE
from tests.unit.cluster.test_standing import Scene, hear


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_what_the_node_does_is_told_at_once_and_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEWS_INTERVAL", 0.001)
    numbers = itertools.count(1)
    scene.stand(news=lambda: Bulletin(0, 1, pid=next(numbers)))
    for number in (1, 2, 3):
        news = hear(scene.seed, News)
        assert isinstance(news, News)
        assert decode_bulletin(news.body) == Bulletin(0, 1, pid=number)


def test_a_node_with_nothing_to_tell_tells_nothing(scene: Scene) -> None:
    asked = threading.Event()
    standing = scene.stand(news=asked.set)
    assert asked.wait(PATIENCE)
    standing.say(Ping(1))
    assert isinstance(scene.seed.hear(), Word)


def test_news_that_cannot_be_made_do_not_cost_the_standing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    standing = scene.stand(news=lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    scene.seed.say(encode_join(AreYouThere(5)))
    assert hear(scene.seed, Here) == Here(5)
    standing.say(Ping(1))
    assert isinstance(scene.seed.hear(), Word)
    assert "tells the seed nothing of itself any more" in caplog.text
