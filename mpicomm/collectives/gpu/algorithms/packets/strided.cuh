// Strided messages: runs of bytes with gaps between them, as a derived datatype of MPI describes
// them. A unit of packets.cu has the same place in the message whether or not there are gaps, so a
// sender with gaps and a receiver without them understand each other. Only loads from the sender's
// memory and stores to the receiver's memory differ. Neither rank packs the message.
#pragma once

#include "units.cuh"

namespace mpicomm {

// The host's copies of these are in arguments.py; a test compares them.
constexpr u32 kStrideLoops = 4;

// Nested loops that visit the runs of a message in its order. A message without gaps has runs of 0
// bytes. The host passes no message of 4 GiB or more, because a division of 64 bits takes four times
// as long.
struct Strides {
  u32 run_nbytes;
  u32 grain;  // a power of two up to 16, which divides the run and all strides
  u32 counts[kStrideLoops];  // the innermost loop first; 1 for a loop that does not exist
  i64 strides[kStrideLoops];
};

// A byte of a message in memory, and the bytes of its run from there on.
struct InRun {
  u8* place;
  u32 left;
};

MPICOMM_DEVICE InRun in_run(const Strides& strides, const u8* first, u32 at) {
  u32 run = at / strides.run_nbytes;
  const u32 begin = at - run * strides.run_nbytes;
  const u8* place = first + begin;
#pragma unroll
  for (u32 loop = 0; loop < kStrideLoops; ++loop) {
    if (strides.counts[loop] == 1) break;
    const u32 outer = run / strides.counts[loop];
    place += (run - outer * strides.counts[loop]) * strides.strides[loop];
    run = outer;
  }
  return {const_cast<u8*>(place), strides.run_nbytes - begin};
}

// Units that several runs share, or whose run is not aligned. Words of `Word` bytes lie in one run
// each. They are out of line, because a kernel also fetches code that it jumps over.
template <class Word>
MPICOMM_DEVICE_CALL Packet load_words(const Strides& strides, const u8* first, u32 at, u32 nbytes) {
  constexpr u32 kBits = 8 * sizeof(Word);
  u64 halves[2] = {};
#pragma unroll
  for (u32 word = 0; word < kPacketNbytes / sizeof(Word); ++word) {
    const u32 offset = word * sizeof(Word);
    if (offset >= nbytes) continue;
    const u64 bits = *reinterpret_cast<const Word*>(in_run(strides, first, at + offset).place);
    halves[offset / 8] |= bits << (word * kBits % 64);
  }
  return __builtin_bit_cast(Packet, Pair{halves[0], halves[1]});
}
template <class Word>
MPICOMM_DEVICE_CALL void store_words(const Strides& strides, const u8* first, u32 at, u32 nbytes, Packet packet) {
  constexpr u32 kBits = 8 * sizeof(Word);
  const Pair pair = __builtin_bit_cast(Pair, packet);
  const u64 halves[2] = {pair.first, pair.second};
#pragma unroll
  for (u32 word = 0; word < kPacketNbytes / sizeof(Word); ++word) {
    const u32 offset = word * sizeof(Word);
    if (offset >= nbytes) continue;
    *reinterpret_cast<Word*>(in_run(strides, first, at + offset).place) =
        static_cast<Word>(halves[offset / 8] >> (word * kBits % 64));
  }
}

// The widest word that lies in one run, in memory that begins at `first`.
MPICOMM_DEVICE u32 word_nbytes(const Strides& strides, const u8* first) {
  const u32 width = width_of(first);
  return width < strides.grain ? width : strides.grain;
}

// Loads the unit at offset `at` of a message of `nbytes` whose memory begins at `first`.
MPICOMM_DEVICE Packet load_strided(const Strides& strides, const u8* first, u64 at, u64 nbytes) {
  if (strides.run_nbytes == 0) return load_at(first, at, nbytes);
  const u32 offset = static_cast<u32>(at), rest = static_cast<u32>(nbytes) - offset;
  const u32 needed = rest < kUnitNbytes ? rest : kUnitNbytes, word = word_nbytes(strides, first);
  if (word == kPacketNbytes && needed == kPacketNbytes) return load_aligned(in_run(strides, first, offset).place);
  if (word >= 8 && needed % 8 == 0) return load_words<u64>(strides, first, offset, needed);
  if (word >= 4) return load_words<u32>(strides, first, offset, needed);
  if (word == 2) return load_words<u16>(strides, first, offset, needed);
  return load_words<u8>(strides, first, offset, needed);
}

MPICOMM_DEVICE void store_strided(const Strides& strides, u8* first, u64 at, u64 nbytes, const Packet& unit) {
  if (strides.run_nbytes == 0) return store_at(first, at, nbytes, unit);
  const u32 offset = static_cast<u32>(at), rest = static_cast<u32>(nbytes) - offset;
  const u32 needed = rest < kUnitNbytes ? rest : kUnitNbytes, word = word_nbytes(strides, first);
  if (word == kPacketNbytes && needed == kPacketNbytes) {
    store_aligned(in_run(strides, first, offset).place, unit);
  } else if (word >= 8 && needed % 8 == 0) {
    store_words<u64>(strides, first, offset, needed, unit);
  } else if (word >= 4) {
    store_words<u32>(strides, first, offset, needed, unit);
  } else if (word == 2) {
    store_words<u16>(strides, first, offset, needed, unit);
  } else {
    store_words<u8>(strides, first, offset, needed, unit);
  }
}

}  // namespace mpicomm
