// For kernels of users: `#include <mpicomm.cuh>`, compiled as C++17 with -I and the directory that
// mpicomm.include_dir() returns. NVRTC and nvcc compile it; other compilers compile it for CPU
// threads.
//
// A kernel reaches the parts of a SymmetricArray on all ranks through its `pointers`, and these
// functions work on them:
//
//     put, get                        copy to a peer, and from a peer
//     signal, wait                    order the work of two groups of threads, on any ranks
//     barrier                         orders the work of all ranks
//     send_packets, receive_packets   short messages that carry their own flags: no signal is
// needed
//     reduce_load                     the sum, maximum or minimum over the parts of all ranks
//
// A group of threads calls each of them together: mpicomm::Thread(), mpicomm::Warp() or
// mpicomm::Block(), the first
// argument. Data and flags lie in SymmetricArrays, flags in one of uint64 that is zero at first:
//
//     mpicomm::put(mpicomm::Block(), mpicomm::part<float>(data, peer), mine, nbytes);
//     mpicomm::signal(mpicomm::Block(), mpicomm::part<u64>(flags, peer), number);
//
//     // on the peer
//     if (!mpicomm::wait(mpicomm::Block(), mpicomm::part<u64>(flags, rank), number, timeout_ns))
// return;
//     ... = mpicomm::part<float>(data, rank)[i];
//
// Plain loads and stores through `part` do the same as get and put. A writer also has to learn when
// it may write memory again that a reader still reads: from a flag in the other direction, from a
// barrier, or from later data of the reader.
//
// At a timeout a function returns false to all threads of the group. The data that it waited for
// may be missing, in part or in whole. The kernel then stores that fact where its host looks, and
// returns: the communicator does not know of it. Ranks that wait for this one run into their own
// timeouts.
//
// All blocks that wait must run at once with the blocks that they wait for. In a grid that is
// larger than the GPU, or between ranks that share a GPU, blocks could wait for blocks that cannot
// begin.
//
// examples/ring_sum.cu and examples/jacobi.cu are kernels with these functions.
#pragma once

#include "mpicomm/barrier.cuh"
#include "mpicomm/copies.cuh"
#include "mpicomm/flags.cuh"
#include "mpicomm/groups.cuh"
#include "mpicomm/packets.cuh"
#include "mpicomm/reduce_load.cuh"
