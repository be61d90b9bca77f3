"""Collectives over several cliques: schedules of two levels, and the engines that move data between cliques."""
