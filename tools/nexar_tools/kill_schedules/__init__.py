"""Random programs whose ranks are killed at random moments; the survivors must agree and go on.

`python -m nexar_tools.kill_schedules --count 500 --seed 7` exits with 0 if every result was right, the survivors agreed
on everything, and nobody waited for longer than the limit.
"""
