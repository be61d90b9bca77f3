// Reduces arrays of several sources element by element, in the order of the sources, several
// packets at a time. Op is an operation of reduce.cuh on elements of type T.
#pragma once

#include "bytes.cuh"
#include "reduce.cuh"

namespace mpicomm {

template <class T>
struct PacketOf {
  T of[kPacketNbytes / sizeof(T)];
};

// Reduces bytes `begin` to `end`. Each thread takes `at_once` packets at a time. `aligned` is
// whether output and sources all lie at multiples of 16 bytes. `source(i)` is the address of source
// i.
template <class Op, class T, u32 at_once, bool aligned, class Source>
MPICOMM_DEVICE void reduce_part(u8* output, Source source, u32 sources, u64 begin, u64 end, u32 thread, u32 threads) {
  constexpr u32 kElements = kPacketNbytes / sizeof(T);
  const u64 stride = static_cast<u64>(threads) * kPacketNbytes;
  for (u64 start = begin + static_cast<u64>(thread) * kPacketNbytes; start < end; start += at_once * stride) {
    typename Op::State states[at_once][kElements];
    for (u32 place = 0; place < sources; ++place) {
      const u8* const from = source(place);
      Packet packets[at_once];
#pragma unroll
      for (u32 i = 0; i < at_once; ++i) {
        const u64 offset = start + i * stride;
        packets[i] = Packet{};
        if (offset < end) {
          packets[i] = aligned ? load_aligned(from + offset) : load_any(from + offset, width_of(from), end - offset);
        }
      }
#pragma unroll
      for (u32 i = 0; i < at_once; ++i) {
        const auto elements = __builtin_bit_cast(PacketOf<T>, packets[i]);
#pragma unroll
        for (u32 e = 0; e < kElements; ++e) {
          states[i][e] = place == 0 ? Op::first(elements.of[e]) : next_of<Op>(states[i][e], elements.of[e], place);
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < at_once; ++i) {
      const u64 offset = start + i * stride;
      PacketOf<T> result;
#pragma unroll
      for (u32 e = 0; e < kElements; ++e) result.of[e] = Op::last(states[i][e], sources);
      const Packet packet = __builtin_bit_cast(Packet, result);
      if (offset >= end) continue;
      if (aligned) store_aligned(output + offset, packet);
      else store_any(output + offset, packet, width_of(output), end - offset);
    }
  }
}

// The number of packets that fit into 64 registers together with their sums.
template <class T>
constexpr u32 kAtOnce = sizeof(T) < 4 ? 2 : 4;

// Reduces `nbytes` with `threads` threads; the caller is number `thread`; `aligned` as above. The
// output may be one of the sources, because a thread reads all contributions to an element before
// it writes the element.
template <class Op, class T, u32 at_once = kAtOnce<T>, class Source>
MPICOMM_DEVICE void reduce_bytes(
    u8* output, Source source, u32 sources, u64 nbytes, bool aligned, u32 thread, u32 threads) {
  constexpr u32 kPackets = kNeedsAll<Op> ? (at_once + 1) / 2 : at_once;  // states of several sums take more registers
  const u64 whole = aligned ? nbytes / kPacketNbytes * kPacketNbytes : 0;
  reduce_part<Op, T, kPackets, true>(output, source, sources, 0, whole, thread, threads);
  reduce_part<Op, T, 1, false>(output, source, sources, whole, nbytes, thread, threads);
}

}  // namespace mpicomm
