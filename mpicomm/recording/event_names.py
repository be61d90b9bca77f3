"""Names in a trace file that its reader knows, too. The module imports nothing, because the reader has no MPI."""

CLOCK = "mpicomm_clock"
"""The event with a reading of the rank's clock."""
DEVICE = "device"
"""The category of the work of calls on a device."""
