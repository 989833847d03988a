"""Starting: who started this process, and how to start, watch and end the ranks of one host."""
