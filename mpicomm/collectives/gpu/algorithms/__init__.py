"""The algorithms of collectives on GPU arrays. Each folder holds a plan, its ctypes arguments and its kernel."""
