"""Collectives: the facts of a call, the choice of its way, and the engines that carry it out."""
