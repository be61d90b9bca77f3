"""The doctor: facts of each rank, and checks that find in them what keeps ranks from working, and the fix."""
