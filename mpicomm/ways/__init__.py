"""The ways of collective calls: the choice of the way of a call, and engines with one interface that carry it out."""
