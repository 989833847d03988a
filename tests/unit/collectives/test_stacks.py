import threading

from nexar.collectives.stacks import stacks


def wait_here(ready: threading.Event, go: threading.Event) -> None:
    ready.set()
    go.wait()


def test_every_thread_says_which_line_of_the_users_it_is_in() -> None:
    ready, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(ready, go), name="the one that waits")
    thread.start()
    ready.wait()
    try:
        found = {stack.thread: stack for stack in stacks()}
    finally:
        go.set()
        thread.join()
    waiting = found["the one that waits"]
    line = wait_here.__code__.co_firstlineno + 2
    assert waiting.at == f"test_stacks.py:{line}", "not that of the library it waits in"
    assert not waiting.main
    assert any(frame.endswith(f"test_stacks.py:{line} in wait_here: go.wait()") for frame in waiting.frames)
    assert "threading.py" in waiting.frames[-1]


def test_the_main_thread_comes_first() -> None:
    first, *others = stacks()
    assert first.main
    assert not any(stack.main for stack in others)
    assert first.at.startswith("test_stacks.py:")
