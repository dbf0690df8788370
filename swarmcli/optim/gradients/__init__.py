"""How gradients of many batches become one."""
