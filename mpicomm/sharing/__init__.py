"""Handles of memory, exchanged between ranks and opened by each."""
