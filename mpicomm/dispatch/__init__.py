"""Dispatch of collective calls: reads a call, chooses its carrier, and makes the engines."""
