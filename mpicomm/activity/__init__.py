"""Activity: the calls of a process in its communicators, in memory that other processes of its user can read."""
