"""Collectives on device arrays over several cliques."""
