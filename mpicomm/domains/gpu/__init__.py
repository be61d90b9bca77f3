"""Collectives on device arrays over several peer domains."""
