"""How far the swarm has come in its epoch: the arithmetic, and the keys under which peers report."""
