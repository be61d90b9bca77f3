"""Agreement between ranks, and which rank is on which node and device."""
