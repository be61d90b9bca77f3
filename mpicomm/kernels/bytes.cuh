// Copies of sixteen bytes at a time, from and to memory of any alignment.
#pragma once

#include "numbers.cuh"

namespace mpicomm {

// The bytes that a thread moves at once. Slots hold packets at multiples of 16 bytes, and arrays of
// users lie at any address.
struct alignas(16) Packet {
  u32 words[4];
};
constexpr u32 kPacketNbytes = 16;
static_assert(sizeof(Packet) == kPacketNbytes);

// The widest access that an address allows: 16, 8, 4, 2 or 1 bytes.
MPICOMM_DEVICE u32 width_of(const void* pointer) {
  const u32 low = (static_cast<u32>(reinterpret_cast<u64>(pointer)) & 15) | 16;
  return low & -low;
}

MPICOMM_DEVICE Packet load_aligned(const u8* from) { return *reinterpret_cast<const Packet*>(from); }
MPICOMM_DEVICE void store_aligned(u8* to, const Packet& packet) { *reinterpret_cast<Packet*>(to) = packet; }

// Loads a packet in accesses of `width` bytes. If only `nbytes` < 16 are left, the rest of the
// packet is zero. The loops are unrolled, because a variable index into a packet would put the
// packet into memory.
MPICOMM_DEVICE Packet load_any(const u8* from, u32 width, u64 nbytes) {
  Packet packet{};
  if (width >= 4 && (nbytes >= kPacketNbytes || nbytes % 4 == 0)) {
#pragma unroll
    for (u32 word = 0; word < 4; ++word) {
      if (word * 4 < nbytes) packet.words[word] = reinterpret_cast<const u32*>(from)[word];
    }
  } else if (width == 2 && nbytes >= kPacketNbytes) {
#pragma unroll
    for (u32 half = 0; half < 8; ++half) {
      packet.words[half / 2] |= static_cast<u32>(reinterpret_cast<const u16*>(from)[half]) << (half % 2 * 16);
    }
  } else {
#pragma unroll
    for (u32 byte = 0; byte < kPacketNbytes; ++byte) {
      if (byte < nbytes) packet.words[byte / 4] |= static_cast<u32>(from[byte]) << (byte % 4 * 8);
    }
  }
  return packet;
}

MPICOMM_DEVICE void store_any(u8* to, const Packet& packet, u32 width, u64 nbytes) {
  if (width >= 4 && (nbytes >= kPacketNbytes || nbytes % 4 == 0)) {
#pragma unroll
    for (u32 word = 0; word < 4; ++word) {
      if (word * 4 < nbytes) reinterpret_cast<u32*>(to)[word] = packet.words[word];
    }
  } else if (width == 2 && nbytes >= kPacketNbytes) {
#pragma unroll
    for (u32 half = 0; half < 8; ++half) {
      reinterpret_cast<u16*>(to)[half] = static_cast<u16>(packet.words[half / 2] >> (half % 2 * 16));
    }
  } else {
#pragma unroll
    for (u32 byte = 0; byte < kPacketNbytes; ++byte) {
      if (byte < nbytes) to[byte] = static_cast<u8>(packet.words[byte / 4] >> (byte % 4 * 8));
    }
  }
}

// Copies whole packets; `load` loads one packet, `store` stores one packet.
template <class Load, class Store>
MPICOMM_DEVICE void copy_packets(u8* to, const u8* from, u64 nbytes, u32 thread, u32 threads, Load load, Store store) {
  constexpr u32 kAtOnce = 4;
  const u64 stride = static_cast<u64>(threads) * kPacketNbytes;
  // All loads come before the first store, so that kAtOnce loads are in flight at once.
  for (u64 start = static_cast<u64>(thread) * kPacketNbytes; start < nbytes; start += kAtOnce * stride) {
    Packet packets[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      if (start + i * stride < nbytes) packets[i] = load(from + start + i * stride);
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      if (start + i * stride < nbytes) store(to + start + i * stride, packets[i]);
    }
  }
}

MPICOMM_DEVICE void copy_each_byte(u8* to, const u8* from, u64 nbytes, u32 thread, u32 threads) {
  for (u64 at = thread; at < nbytes; at += threads) to[at] = from[at];
}

// The side of a copy on which accesses are wide if source and target are not aligned alike. It is
// the memory of the peer.
enum class Wide : u8 { kStores, kLoads };

// Copies `nbytes` with `threads` threads; the caller is number `thread`. Accesses of the wide side
// move whole packets, except before the first multiple of `alignment` and after the last packet.
// Accesses of the other side are as wide as its address allows. If the memory of a peer is the wide
// side and `alignment` is a line, warps and links move whole lines.
template <Wide wide = Wide::kStores, u64 alignment = kLineNbytes>
MPICOMM_DEVICE void copy_bytes(u8* to, const u8* from, u64 nbytes, u32 thread, u32 threads) {
  constexpr bool kWideStores = wide == Wide::kStores;
  const u64 unaligned = -reinterpret_cast<u64>(kWideStores ? to : from) % alignment;
  const u64 head = nbytes < unaligned ? nbytes : unaligned;
  copy_each_byte(to, from, head, thread, threads);
  to += head, from += head, nbytes -= head;
  const u64 rest = nbytes % kPacketNbytes;
  const u32 width = width_of(kWideStores ? from : to);
  if (width == kPacketNbytes) {
    copy_packets(to, from, nbytes - rest, thread, threads, load_aligned, store_aligned);
  } else if constexpr (kWideStores) {
    const auto load = [&](const u8* place) { return load_any(place, width, kPacketNbytes); };
    copy_packets(to, from, nbytes - rest, thread, threads, load, store_aligned);
  } else {
    const auto store = [&](u8* place, const Packet& packet) { store_any(place, packet, width, kPacketNbytes); };
    copy_packets(to, from, nbytes - rest, thread, threads, load_aligned, store);
  }
  copy_each_byte(to + nbytes - rest, from + nbytes - rest, rest, thread, threads);
}

}  // namespace mpicomm
