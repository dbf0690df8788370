"""How peers that want to average find each other and agree on a group."""
