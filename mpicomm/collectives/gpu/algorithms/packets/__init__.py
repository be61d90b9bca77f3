"""Kernels store packets into inboxes of the peers; a packet says itself whether it has arrived."""
