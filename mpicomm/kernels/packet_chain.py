"""The kernel of packet_chain.cu: one variant per reduction. Its arguments are those of chain.cu."""

from __future__ import annotations

from mpicomm.kernels.load import Variant
from mpicomm.kernels.reductions import options_for

# Constants of packet_chain.cu; a test compares them.
PACKET_CHAIN_THREADS = 256
PACKET_CHAIN_SLOTS = 2
PACKET_CHAIN_SLOT_NBYTES = 32 * 1024
BATCH_NBYTES = 2 * 1024


def packet_chain_kernel(reduction: tuple[str, str] | None) -> Variant:
    """Return the kernel for ``(dtype, op)``, of what `sentinels_can_carry`; raises as `options_for`."""
    return Variant("packet_chain.cu", "mpicomm_packet_chain", options_for(reduction))
