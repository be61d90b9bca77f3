// Messages with gaps, as a derived datatype of MPI describes them: regions one after the other. The
// runs of a region are visited by nested loops. A unit of packets.cu has the same place in the message
// whether or not there are gaps, so a sender with gaps and a receiver without them understand each
// other. Only loads from the sender's memory and stores to the receiver's memory differ. Neither rank
// packs the message.
#pragma once

#include "units.cuh"

namespace mpicomm {

// The host's copies of these are in arguments.py; a test compares them.
constexpr u32 kStrideLoops = 4;
constexpr u32 kMostStrides = 52;  // of all messages, so that the arguments of a kernel take less than 4 KiB

// Nested loops that visit runs of bytes in the order of the message. The host passes no message of
// 4 GiB or more, because a division of 64 bits takes four times as long.
struct Strides {
  u32 nbytes;  // of all runs
  u32 run_nbytes;
  u32 counts[kStrideLoops];  // the innermost loop first; 1 for a loop that does not exist
  i64 offset;                // of the first run from the place of the message
  i64 strides[kStrideLoops];
};

// The gaps of one message.
struct Gaps {
  u32 first;  // the number of its first region
  u32 grain;  // a power of two up to 16, which divides all runs, strides and offsets; 0 without gaps
};

// The place of a byte of a message whose regions begin with `region`, and whose memory begins at `first`.
MPICOMM_DEVICE u8* place_of(const Strides* region, const u8* first, u32 at) {
  while (at >= region->nbytes) at -= region++->nbytes;
  u32 run = at / region->run_nbytes;
  const u8* place = first + region->offset + (at - run * region->run_nbytes);
#pragma unroll
  for (u32 loop = 0; loop < kStrideLoops; ++loop) {
    if (region->counts[loop] == 1) break;
    const u32 outer = run / region->counts[loop];
    place += (run - outer * region->counts[loop]) * region->strides[loop];
    run = outer;
  }
  return const_cast<u8*>(place);
}

// Units that several runs share, or whose run is not aligned. Words of `Word` bytes lie in one run
// each. They are out of line, because a kernel also fetches code that it jumps over.
template <class Word>
MPICOMM_DEVICE_CALL Packet load_words(const Strides* regions, const u8* first, u32 at, u32 nbytes) {
  constexpr u32 kBits = 8 * sizeof(Word);
  u64 halves[2] = {};
#pragma unroll
  for (u32 word = 0; word < kPacketNbytes / sizeof(Word); ++word) {
    const u32 offset = word * sizeof(Word);
    if (offset >= nbytes) continue;
    const u64 bits = *reinterpret_cast<const Word*>(place_of(regions, first, at + offset));
    halves[offset / 8] |= bits << (word * kBits % 64);
  }
  return __builtin_bit_cast(Packet, Pair{halves[0], halves[1]});
}
template <class Word>
MPICOMM_DEVICE_CALL void store_words(const Strides* regions, const u8* first, u32 at, u32 nbytes, Packet packet) {
  constexpr u32 kBits = 8 * sizeof(Word);
  const Pair pair = __builtin_bit_cast(Pair, packet);
  const u64 halves[2] = {pair.first, pair.second};
#pragma unroll
  for (u32 word = 0; word < kPacketNbytes / sizeof(Word); ++word) {
    const u32 offset = word * sizeof(Word);
    if (offset >= nbytes) continue;
    *reinterpret_cast<Word*>(place_of(regions, first, at + offset)) =
        static_cast<Word>(halves[offset / 8] >> (word * kBits % 64));
  }
}

// The widest word that lies in one run, in memory that begins at `first`.
MPICOMM_DEVICE u32 word_nbytes(Gaps gaps, const u8* first) {
  const u32 width = width_of(first);
  return width < gaps.grain ? width : gaps.grain;
}

// Loads the unit at offset `at` of a message of `nbytes` whose memory begins at `first`. `strides` are
// the regions of all messages.
MPICOMM_DEVICE Packet load_strided(const Strides* strides, Gaps gaps, const u8* first, u64 at, u64 nbytes) {
  if (gaps.grain == 0) return load_at(first, at, nbytes);
  const Strides* const regions = strides + gaps.first;
  const u32 offset = static_cast<u32>(at), rest = static_cast<u32>(nbytes) - offset;
  const u32 needed = rest < kUnitNbytes ? rest : kUnitNbytes, word = word_nbytes(gaps, first);
  if (word == kPacketNbytes && needed == kPacketNbytes) return load_aligned(place_of(regions, first, offset));
  if (word >= 8 && needed % 8 == 0) return load_words<u64>(regions, first, offset, needed);
  if (word >= 4) return load_words<u32>(regions, first, offset, needed);
  if (word == 2) return load_words<u16>(regions, first, offset, needed);
  return load_words<u8>(regions, first, offset, needed);
}

MPICOMM_DEVICE void store_strided(
    const Strides* strides, Gaps gaps, u8* first, u64 at, u64 nbytes, const Packet& unit) {
  if (gaps.grain == 0) return store_at(first, at, nbytes, unit);
  const Strides* const regions = strides + gaps.first;
  const u32 offset = static_cast<u32>(at), rest = static_cast<u32>(nbytes) - offset;
  const u32 needed = rest < kUnitNbytes ? rest : kUnitNbytes, word = word_nbytes(gaps, first);
  if (word == kPacketNbytes && needed == kPacketNbytes) {
    store_aligned(place_of(regions, first, offset), unit);
  } else if (word >= 8 && needed % 8 == 0) {
    store_words<u64>(regions, first, offset, needed, unit);
  } else if (word >= 4) {
    store_words<u32>(regions, first, offset, needed, unit);
  } else if (word == 2) {
    store_words<u16>(regions, first, offset, needed, unit);
  } else {
    store_words<u8>(regions, first, offset, needed, unit);
  }
}

}  // namespace mpicomm
