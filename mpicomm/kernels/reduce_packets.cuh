// Reduces packets element by element. For kernels that are compiled for a reduction: MPICOMM_DTYPE
// and MPICOMM_OP.
#pragma once

#include "bytes.cuh"
#include "element.cuh"

namespace mpicomm {

constexpr u32 kElements = kPacketNbytes / sizeof(Element);

struct Elements {
  Element of[kElements];
};

// Returns the reduction of two contributions.
MPICOMM_DEVICE Packet reduce_packets(const Packet& first, const Packet& second) {
  const Elements one = __builtin_bit_cast(Elements, first), other = __builtin_bit_cast(Elements, second);
  Elements result;
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) result.of[e] = Op::last(next_of<Op>(Op::first(one.of[e]), other.of[e], 1), 2);
  return __builtin_bit_cast(Packet, result);
}

// Returns the reduction of the contributions of several ranks, in rank order. `set` has bit r for
// rank r. Only the first `nbytes` of the packets count.
template <u64 nbytes, u32 ranks>
MPICOMM_DEVICE Packet reduce_packets(const Packet (&packets)[ranks], u32 set) {
  constexpr u32 kReduced = nbytes / sizeof(Element);
  typename Op::State states[kReduced];
  u32 count = 0;
#pragma unroll
  for (u32 rank = 0; rank < ranks; ++rank) {
    if (!kNeedsAll<Op> && !(set >> rank & 1)) continue;  // `count` is a constant if all have come
    const Elements elements = __builtin_bit_cast(Elements, packets[rank]);
#pragma unroll
    for (u32 e = 0; e < kReduced; ++e) {
      states[e] = count == 0 ? Op::first(elements.of[e]) : next_of<Op>(states[e], elements.of[e], count);
    }
    ++count;
  }
  Elements result{};
#pragma unroll
  for (u32 e = 0; e < kReduced; ++e) result.of[e] = Op::last(states[e], count);
  return __builtin_bit_cast(Packet, result);
}

}  // namespace mpicomm
