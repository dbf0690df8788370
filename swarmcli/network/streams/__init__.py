"""Streams of messages with payloads, each on a connection of its own."""
