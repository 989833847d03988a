import os

from nexar_tools.soak.resources import ResourceUsage, UsageHistory, usage_of

USUAL = ResourceUsage(20, 8, 60.0)


def test_a_process_that_runs_holds_something_and_one_that_ended_nothing() -> None:
    held = usage_of(os.getpid())
    assert held is not None
    assert held.descriptors > 2
    assert held.threads >= 1
    assert held.megabytes > 5
    assert usage_of(2**22 + 1) is None


def test_who_holds_what_is_usual_does_not_leak_though_the_world_grows() -> None:
    account = UsageHistory("somebody")
    for size in range(30):
        usual = ResourceUsage(20 + size, 8, 60.0 + size)
        account.add(ResourceUsage(22 + size, 8, 61.0 + size), usual)
    assert account.growth == ResourceUsage(0, 0, 0)
    assert account.leaks() == []


def test_who_holds_more_and_more_leaks_and_is_named() -> None:
    account = UsageHistory("somebody")
    for number in range(30):
        account.add(ResourceUsage(20 + 2 * number, 8, 60.0 + 9 * number), USUAL)
    assert account.leaks() == [
        "somebody leaks: 40 descriptors more, over 30 samples",
        "somebody leaks: 180 MB more, over 30 samples",
    ]


def test_a_few_samples_say_nothing() -> None:
    account = UsageHistory("somebody")
    account.add(USUAL, USUAL)
    account.add(ResourceUsage(1000, 1000, 1000), USUAL)
    assert account.leaks() == []
