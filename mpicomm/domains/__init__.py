"""Collectives over several peer domains: schedules of two levels, and the engines that move data between domains."""
