"""The owner of a run: its key, invitations and revocations."""
