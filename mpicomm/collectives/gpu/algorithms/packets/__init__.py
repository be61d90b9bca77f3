"""Kernels store packets into inboxes of the peers; a packet itself shows whether it has arrived."""
