"""Several processes behind one peer: who starts them, and how each of them behaves."""
