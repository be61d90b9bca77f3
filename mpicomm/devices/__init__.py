"""Memory, streams and events of one device: the Protocol, the host, and CUDA."""
