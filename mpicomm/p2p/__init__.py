"""Bandwidth and latency between each two ranks."""
