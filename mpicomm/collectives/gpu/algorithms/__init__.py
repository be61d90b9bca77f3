"""The algorithms of collectives on GPU arrays, a folder each: its plan, its ctypes arguments, its kernel."""
