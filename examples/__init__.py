"""Programs to copy from: training loops that strangers can join."""
