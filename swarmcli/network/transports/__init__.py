"""How bytes get from one peer to another."""
