"""What a process is in a run: trainer, auxiliary or monitor."""
