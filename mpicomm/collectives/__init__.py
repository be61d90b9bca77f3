"""Collectives: what a call means, which way it goes, and the engines that carry it out."""
