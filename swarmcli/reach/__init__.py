"""Whether others can dial this peer, and how they reach it where they cannot: docs/reach.md."""
