"""`nexar bench`: measures collectives and messages, and compares with other systems in the same run.

Each system (nexar, gloo, …) is a set of long-lived ranks. While one measures, the ranks of all others sleep in a read.
All run the same code (`measuring`), which therefore needs NumPy and nothing else.
"""
