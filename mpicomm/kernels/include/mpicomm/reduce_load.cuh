// reduce_load: the sum, maximum or minimum over the parts of all ranks.
#pragma once

#include "../../reduce_bytes.cuh"
#include "copies.cuh"

namespace mpicomm {

// Loads elements `first` to `first + count` of the parts of all ranks. Reduces them element by
// element, in the order of the ranks, and stores the results in `to`. `Operation` is
// mpicomm::op::sum, op::max or op::min, as in
//
//     mpicomm::reduce_load<mpicomm::op::sum>(mpicomm::Block(), sums, pointers, size, first, count);
//
// T is an integer, float, double, mpicomm::dtype::float16 or mpicomm::dtype::bfloat16. The last two
// have the bits of __half and __nv_bfloat16. Their sums are computed in float32 and rounded once.
// The results have the bits of Allreduce.
//
// `to` and the parts have the alignment of T. If the address of `to` and of element `first` of each
// part have the same remainder modulo 16, loads and stores move 16 bytes. `to` may be these
// elements of this rank's part, if no other rank reads them at that time.
//
// Orders: all threads of the group may read `to` after the call. Before the call, the caller must
// have learned, for example from `barrier`, that all ranks have written these elements. After the
// call, a barrier tells the ranks that they may write the elements again. Callers: all threads of
// the group. The ranks may share the elements among them, so that each rank reduces some of them.
// Timeout: it waits for no other rank.
template <template <class> class Operation, class T, class Group>
MPICOMM_DEVICE void reduce_load(Group group, T* to, const u64* pointers, u32 size, u64 first, u64 count) {
  using Op = Operation<T>;
  const u64 nbytes = count * sizeof(T), unaligned = -reinterpret_cast<u64>(to) % kPacketNbytes;
  const u64 head = nbytes < unaligned ? nbytes : unaligned;
  const auto source = [=](u32 rank) { return reinterpret_cast<const u8*>(part<const T>(pointers, rank) + first); };
  const auto rest = [=](u32 rank) { return source(rank) + head; };
  bool aligned = true;
  for (u32 rank = 0; rank < size; ++rank) aligned = aligned && width_of(rest(rank)) == kPacketNbytes;
  u8* const output = reinterpret_cast<u8*>(to);
  reduce_bytes<Op, T>(output, source, size, head, false, group.number(), group.size());
  reduce_bytes<Op, T>(output + head, rest, size, nbytes - head, aligned, group.number(), group.size());
  group.sync();  // without it a thread could read results that another thread has not stored yet
}

}  // namespace mpicomm
