"""How peers hand their state and committed rounds to those who need them."""
