"""`nexar bench`: how fast the collectives and messages are here, beside others that were asked for, in one run.

Each system (nexar, gloo, …) is a set of long-lived ranks. The command tells every rank, over a line of its own, what
to measure next, one system after the other: while one measures, the ranks of all others sleep in a read. What a rank
does then is the same code for all systems (`measuring`, `pattern`), which therefore needs NumPy and nothing else.
"""
