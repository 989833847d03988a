"""`nexar bench`: measures collectives and messages, and compares nexar with other systems in the same run.

Each system (nexar, gloo, …) is a set of long-lived ranks; while one measures, the others sleep in a read. All run the
same code (`measuring`), which therefore needs only NumPy.
"""
