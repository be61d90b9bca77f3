"""The names in a trace file that the reader of the file has to know. It imports nothing, because a reader has no MPI."""

CLOCK = "mpicomm_clock"
"""The event that has a reading of the rank's clock."""
WAIT = "wait"
"""The category of waits for requests."""
DEVICE = "device"
"""The category of the work of calls on a device."""
