"""Bandwidth and latency between each two GPUs of this process, or between each two ranks."""
