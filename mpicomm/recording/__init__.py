"""Recording: records of calls, with their times, in a trace file, in NVTX ranges and in counts; and ranks' clocks."""
