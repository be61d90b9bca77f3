// The counts and the tokens of a receiver block of a dispatch, in shared memory and in registers.
#pragma once

#include "experts_dispatch.cuh"

namespace mpicomm {

// The columns of a count: the pairs of each expert, then the rows of each rank in the layout by token.
constexpr u32 kMaxColumns = kMaxExperts + kMaxRanks;

// A pair, or a token with slot 0.
struct Route {
  u32 source;
  u32 token;
  u32 slot;
};

struct Layout {
  u32 histograms[kWarps][kMaxColumns];  // the pairs of a warp, later its next place
  u32 before[kMaxColumns];  // the pairs of earlier blocks
  u32 totals[kMaxColumns];  // the pairs of later blocks, then of all
  u32 offsets[kMaxExperts + 1];  // of all experts of all ranks, one after the other
  u32 tokens[kMaxRanks];          // of each source
};

// The pair of a lane, beside the pairs of the other lanes of its warp.
struct LanePair {
  Route route{};
  bool exists = false;
  u32 expert = kNoExpert;  // kNoExpert without a pair, too
  u32 weight = 0;
  u32 owner = kMaxRanks;  // the rank of the expert
  bool is_new = false;    // the first slot of its token with an expert of that rank
};

// The tokens that receivers share out, by number. A division takes long, so a thread computes them once.
struct Shares {
  u32 all;  // Tokens have numbers in their order. Numbers that sources with fewer tokens leave out stand for none.
  u32 begin;  // of this warp
  u32 end;
  u32 block_begin;  // of this block
  u32 block_end;
};

}  // namespace mpicomm
