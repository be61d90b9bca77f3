"""Memory, streams and events of one device: the Protocols, the host, and CUDA."""
