// For kernels of users: `#include <mpicomm.cuh>`, compiled as C++17 with -I and the directory that
// mpicomm.include_dir() returns. NVRTC and nvcc compile it for GPUs, and other compilers compile it
// for CPU threads.
//
// The `pointers` of a SymmetricArray give a kernel the parts of the array on all ranks. These
// functions work on the parts:
//
//     put, get                        copy to a peer, and from a peer
//     signal, wait                    order the work of two groups of threads, on any ranks
//     barrier                         orders the work of all ranks
//     send_packets, receive_packets   send short messages, which need no signal
//     reduce_load                     the sum, maximum or minimum over the parts of all ranks
//
// All threads of a group call a function together. The group is the first argument:
// mpicomm::Thread(), mpicomm::Warp() or mpicomm::Block(). Data and flags lie in SymmetricArrays.
// The SymmetricArray of flags has elements of uint64 and is zero at first:
//
//     mpicomm::put(mpicomm::Block(), mpicomm::part<float>(data, peer), mine, nbytes);
//     mpicomm::signal(mpicomm::Block(), mpicomm::part<u64>(flags, peer), number);
//
//     // on the peer
//     u64* const flag = mpicomm::part<u64>(flags, rank);
//     if (!mpicomm::wait(mpicomm::Block(), flag, number, timeout_ns)) return;
//     ... = mpicomm::part<float>(data, rank)[i];
//
// Plain loads and stores through `part` do the same as get and put. Before a writer overwrites
// memory, it must know that no reader still reads it. It learns this from a flag in the other
// direction, from a barrier, or from later data of the reader.
//
// At a timeout a function returns false to all threads of the group. The data that it waited for
// may be missing, in part or in whole. The kernel then stores this fact in memory that its host
// reads, and returns, because the communicator does not know of the timeout. Ranks that wait for
// this rank run into their timeouts.
//
// All blocks that wait must run at once with the blocks that they wait for. If the grid is larger
// than the GPU, or if ranks share a GPU, blocks could wait for blocks that cannot begin.
//
// examples/ring_sum.cu and examples/jacobi.cu are kernels with these functions.
#pragma once

#include "mpicomm/barrier.cuh"
#include "mpicomm/copies.cuh"
#include "mpicomm/flags.cuh"
#include "mpicomm/groups.cuh"
#include "mpicomm/packets.cuh"
#include "mpicomm/reduce_load.cuh"
