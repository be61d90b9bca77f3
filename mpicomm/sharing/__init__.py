"""The exchange of memory handles between ranks, and the choice of their kind."""
