"""Collectives on GPU arrays: which algorithm a call takes, its plan, and the engine that enqueues the plan."""
