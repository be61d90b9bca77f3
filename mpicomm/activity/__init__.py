"""Activity: what a process does in its communicators, in shared memory that other processes of its user can read."""
