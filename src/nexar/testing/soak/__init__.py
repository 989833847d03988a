"""Real processes that come and die all the time, and compute together with whoever is there, for minutes or hours.

`python -m nexar.testing.soak --minutes 20 --seed 7` ends with 0 if no result was wrong, nothing stood still, nobody
ended that was not killed, and nothing leaked.
"""
