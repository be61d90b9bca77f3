"""Activity: it says what a process does in its communicators, in memory that other processes of its user can read."""
