"""How tensors and nested state lie in files, for checkpoints of single processes and of sites."""
