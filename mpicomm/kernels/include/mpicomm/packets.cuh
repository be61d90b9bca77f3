// Messages in LL packets: 16 bytes {data, epoch, data, epoch} with 8 bytes of data. The receiver
// polls its memory until each packet has come. So a message crosses the link once, while a put and
// a signal cross it twice, one after the other. Packets take twice the bytes, so they are for
// messages of up to some KiB.
#pragma once

#include "../../ll_protocol.cuh"
#include "flags.cuh"

namespace mpicomm {

// The size of the slots for a message of `nbytes`.
MPICOMM_DEVICE constexpr u64 packets_nbytes(u64 nbytes) {
  return (nbytes + LLProtocol::kUnitNbytes - 1) / LLProtocol::kUnitNbytes * kPacketNbytes;
}

// Returns the data of one packet. `nbytes` are left, and bytes beyond these are zero.
MPICOMM_DEVICE Packet load_packet_data(const u8* from, u32 width, u64 nbytes) {
  if (width >= 8 && nbytes >= 8) return __builtin_bit_cast(Packet, Pair{*reinterpret_cast<const u64*>(from), 0});
  return load_any(from, width, nbytes < 8 ? nbytes : 8);
}
MPICOMM_DEVICE void store_packet_data(u8* to, const Packet& data, u32 width, u64 nbytes) {
  if (width >= 8 && nbytes >= 8) *reinterpret_cast<u64*>(to) = __builtin_bit_cast(Pair, data).first;
  else store_any(to, data, width, nbytes < 8 ? nbytes : 8);
}

// Sends `nbytes` to `slots` in the memory of a peer. The slots have packets_nbytes(nbytes) bytes at
// a multiple of 16, in a SymmetricArray that is zero at first. `from` may have any address.
//
// `epoch` is the number of the message. It is not 0, larger than the epochs of all earlier messages
// in these slots, and the same on the receiver. After 2^32 - 1 messages the ranks zero the slots
// between two barriers, and begin with 1 again.
//
// The sender must know that the receiver has taken the last message from these slots. If both ranks
// send to each other, two sets of slots in turns are enough. A rank that has received message n
// knows that the peer was done with message n - 1. So it may store message n + 1 in the slots of
// message n - 1.
//
// Orders: it reads `from` after all stores that threads of the group made before the call. It
// publishes no other stores: the receiver may read only this data. Callers: all threads of the
// group. Timeout: it waits for no other rank.
template <class Group>
MPICOMM_DEVICE void send_packets(Group group, void* slots, const void* from, u64 nbytes, u32 epoch) {
  group.sync();  // a thread sends bytes that other threads of the group may have stored
  const u8* const data = static_cast<const u8*>(from);
  const u32 width = width_of(data);
  const u64 stride = static_cast<u64>(group.size()) * LLProtocol::kUnitNbytes;
  for (u64 at = static_cast<u64>(group.number()) * LLProtocol::kUnitNbytes; at < nbytes; at += stride) {
    const Packet unit = load_packet_data(data + at, width, nbytes - at);
    store_volatile(static_cast<Pair*>(slots) + at / LLProtocol::kUnitNbytes, LLProtocol::packet(unit, epoch));
  }
}

// Receives `nbytes` from `slots` in the memory of this rank into `to`, which may have any address,
// and returns true. The group of the sender may have another number of threads.
//
// Orders: all threads of the group may read `to` after the call. It acquires no other stores of the
// sender. Callers: all threads of the group. Timeout: it returns false if a packet does not come
// within `timeout_ns`. Then `to` may hold a part of the message.
template <class Group>
MPICOMM_DEVICE bool receive_packets(
    Group group, void* to, const void* slots, u64 nbytes, u32 epoch, u64 timeout_ns) {
  constexpr u32 kAtOnce = 4;
  u8* const data = static_cast<u8*>(to);
  const u32 width = width_of(data);
  const u64 begin = static_cast<u64>(group.number()) * LLProtocol::kUnitNbytes;
  const u64 stride = static_cast<u64>(group.size()) * LLProtocol::kUnitNbytes;
  bool come = true;
  for (u64 first = begin; first < nbytes; first += kAtOnce * stride) {
    Pair packets[kAtOnce];
    // Each poll loads all packets, so that kAtOnce loads are in flight at once.
    const auto reached = [&] {
      bool all = true;
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u64 at = first + i * stride;
        if (at < nbytes) packets[i] = load_volatile(static_cast<const Pair*>(slots) + at / LLProtocol::kUnitNbytes);
      }
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        if (first + i * stride < nbytes) all = all && LLProtocol::has_arrived(packets[i], epoch);
      }
      return all;
    };
    come = poll_until(reached, timeout_ns);
    if (!come) break;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u64 at = first + i * stride;
      if (at < nbytes) store_packet_data(data + at, LLProtocol::unit(packets[i]), width, nbytes - at);
    }
  }
  return group.all(come);  // without the barrier a thread could read bytes that another thread has not stored yet
}

}  // namespace mpicomm
