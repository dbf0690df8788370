"""The checkpoints on this computer: which there are, which are whole, which stay. No tensors, so that it is light."""
