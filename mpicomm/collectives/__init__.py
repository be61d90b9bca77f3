"""Collectives: the facts of a call, the choice of its algorithm, and the engines that carry it out."""
