"""How the gradients of many batches, and of many peers, become one."""
