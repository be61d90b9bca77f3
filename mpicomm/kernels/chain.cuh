// What is told of a chain of ranks, each of which sends on what comes, as it is or reduced with what it has; and its
// channels. A warp of a rank and the same warp of the next one are a channel, with slots in the next one's memory, words
// for flags there, and a word for credit in the sender's memory. The message is cut into chunks, which the channels carry
// in turn, each first in first out: the first chunks are at the end of the chain when the last are still to be sent.
// Slots that are filled are counted for ever, by epochs: the one of epoch e is slot e % kSlots. Both sides keep their
// count in their own memory and the kernel advances it, so a captured graph can be replayed for ever.
#pragma once

#include "channel_words.cuh"

namespace mpicomm {

// The host's copies of these structures are in chain.py; a test compares them.

// Where a rank stands in the chain: what it adds, if anything, where it keeps what comes of that, if it does, and on
// which sides it has a neighbour.
struct Place {
  const u8* own;
  u8* output;
  u32 receives;
  u32 sends;
};

// With so many slots in a channel, no more than words in a line.
template <u32 slots_of_channel, u64 slot_nbytes>
struct Chain {
  static constexpr u32 kSlots = slots_of_channel;
  static constexpr u64 kSlotNbytes = slot_nbytes;
  static_assert(kSlots <= kLineNbytes / sizeof(u64));

  Team team;
  Place places[2];  // the second for a rank that is first and last
  u64 nbytes;
  u64 chunk_nbytes;       // no more than a slot has
  u8* memory[kMaxRanks];  // every rank's, as mapped here; counts are at its start
  u64 credits;            // where they begin in it
  u64 flags;
  u64 slots;
  u32 channels;  // that a memory has
  u32 blocks;    // of one place
  u32 previous;
  u32 next;
  u32 tag;
  u32 unused;

  MPICOMM_DEVICE u32* count(bool sends, u32 channel) const {
    return reinterpret_cast<u32*>(memory[team.rank]) + (sends ? channels : 0) + channel;
  }
  MPICOMM_DEVICE u64* credit(u32 owner, u32 channel) const {
    return reinterpret_cast<u64*>(memory[owner] + credits + channel * kLineNbytes);
  }
  MPICOMM_DEVICE u64* flag(u32 owner, u32 channel, u32 epoch) const {
    return reinterpret_cast<u64*>(memory[owner] + flags + channel * kLineNbytes) + epoch % kSlots;
  }
  // Strides are those of the memory: were they those of the message, chunks of two messages could overlap.
  MPICOMM_DEVICE u8* slot(u32 owner, u32 channel, u32 epoch) const {
    return memory[owner] + slots + (static_cast<u64>(channel) * kSlots + epoch % kSlots) * kSlotNbytes;
  }

  MPICOMM_DEVICE const Place& place() const { return places[blockIdx.x / blocks]; }
  // That of this thread's warp.
  MPICOMM_DEVICE u32 channel() const { return threadIdx.x / kLanes * blocks + blockIdx.x % blocks; }
  // From one chunk of a channel to the next.
  MPICOMM_DEVICE u64 stride() const { return static_cast<u64>(blockDim.x / kLanes) * blocks * chunk_nbytes; }
  // For a wait for that neighbour to come to an epoch.
  MPICOMM_DEVICE Watch watch(u32 peer, u32 epoch) const {
    return {team.faults, team.timeout_ns, kExchange, epoch, blockIdx.x, team.names[peer]};
  }
};

}  // namespace mpicomm
