"""Agreement between ranks, and the node and the device of each rank."""
