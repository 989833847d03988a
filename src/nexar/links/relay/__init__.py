"""Links to peers that are no neighbours: their frames travel over other nodes, end to end in order and without loss.

carrier   looks like any other carrier to its link        station   the node's: what arrives, goes on, or goes out
stream    numbers, acknowledgements, what is sent again   hop       one neighbour: room by hops travelled
landing   where arriving payloads go                      (stream, hop and landing do no I/O)
"""
