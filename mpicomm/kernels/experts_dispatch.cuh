// The argument of a dispatch of a mixture of experts: see experts_dispatch.cu.
#pragma once

#include "experts.cuh"

namespace mpicomm {

// The host's copy is in experts.py; a test compares them.
constexpr u32 kDispatchThreads = 384;
constexpr u32 kWarps = kDispatchThreads / kLanes;

// Rows that lie in two arrays: elements, and their scales if they have scales.
template <class Byte>
struct TwoArrays {
  Byte* first;
  Byte* second;
  u64 first_nbytes;   // of a row
  u64 second_nbytes;  // 0 without a second array

  // The address of byte `at` of a row.
  MPICOMM_DEVICE Byte* at(u64 row, u64 at) const {
    return at < first_nbytes ? first + row * first_nbytes + at : second + row * second_nbytes + (at - first_nbytes);
  }
};

// The host's copies of this structure and of TwoArrays are in experts.py; a test compares them.
struct Dispatch {
  Experts experts;
  TwoArrays<const u8> x;  // rows of this rank's tokens
  TwoArrays<u8> rows;     // of the result
  const void* ids;    // top_k ids of each token, -1 for a slot without an expert
  const float* weights;  // as many weights; null for ones
  // Memory of the result.
  i32* counts;    // the pairs of each expert of this rank
  i32* offsets;   // the first place of each expert of this rank, and the end of the last
  i32* sources;   // the rank, token and slot of the pair at each place, or -1 three times
  float* place_weights;
  i32* places;    // of each pair of each source, or -1
  Targets* targets;  // of each token of this rank
  u32* tokens;    // the number of tokens of each source
  // The next five are null in the layout by expert, where each place has a row.
  i32* token_rows;   // the row of each token of each source, or -1
  i32* place_rows;   // the row of the token at each place, or -1
  i32* slot_ids;     // for each row and slot: the number of the expert on this rank, or -1
  float* slot_weights;
  i32* row_count;
  u64 capacity;   // rows of the result
  u64 all_places;
  u32 num_tokens; // of this rank
  u32 alignment;  // the rows of each expert begin at a multiple
  u32 wide_ids;   // whether ids have 64 bits
  u32 unused;
};

constexpr u32 kNoExpert = ~0u;      // the id of a slot without an expert
constexpr u32 kWrongExpert = ~1u;   // in a packet: the id is no expert
constexpr u32 kNewRank = 1u << 30;  // in a packet: no earlier slot of the token has an expert of this rank
static_assert(kMaxExperts <= kNewRank && (kNewRank | kMaxExperts) < kWrongExpert, "packets tell these apart");

MPICOMM_DEVICE i64 id_of(const Dispatch& x, u64 pair) {
  return x.wide_ids ? static_cast<const i64*>(x.ids)[pair] : static_cast<const i32*>(x.ids)[pair];
}

// The expert of an id, kNoExpert or kWrongExpert.
MPICOMM_DEVICE u32 expert_of(const Dispatch& x, i64 id) {
  if (id == -1) return kNoExpert;
  return id >= 0 && id < static_cast<i64>(num_experts(x.experts)) ? static_cast<u32>(id) : kWrongExpert;
}

// The rank of an expert, or kMaxRanks.
MPICOMM_DEVICE u32 owner_of(const Dispatch& x, u32 expert) {
  return expert >= kWrongExpert ? kMaxRanks : rank_of(x.experts, expert);
}

// Waits for a packet of a source. Packets need no order: see packet_protocols.cuh.
MPICOMM_DEVICE bool await_packet(const Experts& x, const Launch& launch, u32 source, const Pair* place, Packet& unit) {
  Pair packet{};
  const auto reached = [&] {
    packet = load_volatile(place);
    return LLProtocol::has_arrived(packet, static_cast<u32>(launch.number));
  };
  if (!await_peer(x, kDispatch, launch.number, source, reached)) return false;
  unit = LLProtocol::unit(packet);
  return true;
}

}  // namespace mpicomm
