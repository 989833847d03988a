"""Soak test: processes join, compute together and are killed.

`python -m nexar_tools.soak --minutes 20 --seed 7` exits with 0 if all results were right, progress never stopped,
only killed processes ended, and nothing leaked.
"""
