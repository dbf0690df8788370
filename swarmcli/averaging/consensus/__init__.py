"""How a round gets one outcome: single-decree Paxos, first without I/O, then on the network."""
