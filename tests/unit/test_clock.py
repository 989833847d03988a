from nexar.clock import Clock, SystemClock


def test_the_system_clock_never_goes_back():
    clock: Clock = SystemClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)
