"""A rank that works and goes on without who is lost, for a few rounds at least, until a file says that it is enough.
Rank 1 comes late.
"""

import sys
import time
from pathlib import Path

import numpy as np

import nexar

ROUNDS = 5  # that whoever looks at the trace finds whole, however soon it was enough

enough, finished = Path(sys.argv[1]), 0
comm = nexar.init()
gradient = np.ones(50_000, np.float32)
while True:
    try:
        time.sleep(0.02 if comm.rank == 1 else 0.005)
        done = comm.all_reduce(float(enough.exists()), op="max")
        comm.all_reduce(gradient)
    except nexar.MembershipChanged as change:
        comm = change.communicator
        continue
    finished += 1
    if done and finished >= ROUNDS:
        break
comm.close()
