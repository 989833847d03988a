"""A terminal that the launcher reads for rank 0."""

import os
import selectors

import pytest

from nexar.launch import process
from nexar.launch.process import StandardInput


class Scene:
    """A launcher at a terminal; it is in the foreground or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.foreground = True
        monkeypatch.setattr(process, "_is_foreground", lambda _: self.foreground)
        self.keyboard, self.terminal = os.openpty()
        self.selector = selectors.DefaultSelector()
        self.input = StandardInput(self.selector, self.terminal)

    def type(self, text: bytes) -> None:
        os.write(self.keyboard, text)

    def turn(self) -> None:
        for key, _ in self.selector.select(30.0):
            key.data()

    def passed_on(self) -> bytes:
        assert self.input._pipe is not None
        os.set_blocking(self.input._pipe[0], False)
        return os.read(self.input._pipe[0], 4096)

    def close(self) -> None:
        self.input.__exit__(None, None, None)
        self.selector.close()
        os.close(self.keyboard)
        os.close(self.terminal)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch):
    made = Scene(monkeypatch)
    yield made
    made.close()


def test_a_launcher_in_the_background_does_not_read(scene: Scene) -> None:
    scene.foreground = False
    scene.type(b"for the shell\n")
    scene.turn()
    assert scene.terminal not in scene.selector.get_map()


def test_a_launcher_that_is_put_in_the_foreground_goes_on_reading(scene: Scene) -> None:
    scene.foreground = False
    scene.type(b"typed\n")
    scene.turn()
    scene.foreground = True
    scene.input.resume()
    scene.turn()
    assert scene.passed_on() == b"typed\n"


def test_going_on_changes_nothing_for_an_input_that_is_read_or_has_ended(scene: Scene) -> None:
    scene.input.resume()
    scene.type(b"\x04")
    scene.turn()
    scene.input.resume()
    assert scene.terminal not in scene.selector.get_map()
