"""The doctor: facts of each rank, and checks that find the causes why ranks do not work, and the fixes."""
