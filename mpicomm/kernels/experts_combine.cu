// The combine of a mixture of experts: every token gets the weighted sum of the rows of its experts.
// experts.cuh has the memory, and the reason why no rank waits in a circle.
//
// Order of sums. A rank adds its rows of a token in the order of the token's slots, in float32, and
// rounds the sum to the type of the rows. In the layout by token its one row of a token is the sum.
// The rank of the token adds these sums in the order of the ranks, in float32, and rounds the result to
// its type. Each step takes the same numbers in the same order in every run, so the result has the same
// bits.
//
// Senders add the rows of tokens of other ranks, and push the sums. Receivers add the rows of this
// rank's tokens that lie here, and the sums of the other ranks as they come.

#include "element.cuh"
#include "experts_packets.cuh"
#include "experts_runs.cuh"

namespace mpicomm {

// The host's copies of this constant and of Combine are in experts.py; a test compares them.
constexpr u32 kSumThreads = 256;

struct Combine {
  Experts experts;
  const u8* rows;             // laid out by a dispatch, which has made these arrays, too
  const float* row_weights;   // null for ones
  const i32* places;
  const i32* token_rows;      // null in the layout by expert
  const Targets* targets;
  const u32* tokens;
  const float* values;  // of each row, in the layout by token of each slot of each row; null for none
  u8* output;
  float* slot_values;   // the value of the row of each slot of each token, or 0
  u32 num_tokens;  // of this rank
  u32 unused;
};

using Result = dtype::MPICOMM_RESULT;
constexpr bool kByToken = MPICOMM_BY_TOKEN;
constexpr bool kInPackets = MPICOMM_IN_PACKETS;  // whether sums travel as packets: see experts_packets.cuh
constexpr u32 kElements = kPacketNbytes / sizeof(Element);

struct Elements {
  Element of[kElements];
};
struct alignas(kElements * sizeof(Result) < 16 ? kElements * sizeof(Result) : 16) Results {
  Result of[kElements];
};

// The rows of a token of `source` on this rank, one on each lane.
struct LocalRows {
  const u8* row = nullptr;
  float weight = 1;
  i32 value = -1;  // the number of the value of this lane's pair in `values`, or -1
  u32 lanes;  // the set of lanes that have a row

  MPICOMM_DEVICE LocalRows(const Combine& x, u32 source, u32 token, u32 lane) {
    const u32 top_k = x.experts.top_k;
    const u64 number = static_cast<u64>(source) * x.experts.max_tokens + token;
    i64 at = -1;
    i32 place = -1;
    if (lane < top_k && (!kByToken || x.values != nullptr)) place = x.places[number * top_k + lane];
    if (kByToken) {
      const i64 of_token = x.token_rows[number];
      if (lane == 0) at = of_token;
      if (place >= 0) value = static_cast<i32>(of_token * top_k + lane);
    } else {
      at = place;
      if (x.values != nullptr) value = place;
      if (place >= 0 && x.row_weights != nullptr) weight = x.row_weights[place];
    }
    if (at >= 0) row = x.rows + at * x.experts.row_nbytes;
    lanes = __ballot_sync(kWarp, at >= 0);
  }
};

MPICOMM_DEVICE void add(float* sums, const Packet& packet, float factor) {
  const Elements elements = __builtin_bit_cast(Elements, packet);
#pragma unroll
  for (u32 i = 0; i < kElements; ++i) sums[i] += factor * Number<Element>::decode(elements.of[i]);
}

constexpr u32 kAtOnce = 2;
struct Sums {
  Packet of[kAtOnce];
};

// Adds the rows of a token in their order, and rounds, for packets `first` to `first` + kAtOnce of a
// part. All lanes of the warp call it.
MPICOMM_DEVICE Sums sum_rows(const LocalRows& local, const Part& part, u32 first) {
  constexpr u32 kRows = 4;  // the loads of so many rows are in flight together
  float sums[kAtOnce][kElements];
#pragma unroll
  for (u32 i = 0; i < kAtOnce; ++i) {
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) sums[i][e] = 0;
  }
  for (u32 left = local.lanes; left != 0;) {
    Packet packets[kRows][kAtOnce];
    const u32 lanes = left;
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
      // The first lane stands for a row that is not there. Its packets are not added.
      const u32 lane = left != 0 ? __ffs(left) - 1 : 0;
      const u8* const from = reinterpret_cast<const u8*>(__shfl_sync(kWarp, reinterpret_cast<u64>(local.row), lane));
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        if (left != 0 && part.has(first + i)) packets[row][i] = load_aligned(from + part.at(first + i));
      }
      left &= left - 1;
    }
    // The weights come after the loads of the rows, which need not wait for them.
    u32 taken = lanes;
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
      const float factor = __shfl_sync(kWarp, local.weight, taken != 0 ? __ffs(taken) - 1 : 0);
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        if (taken != 0 && part.has(first + i)) add(sums[i], packets[row][i], factor);
      }
      taken &= taken - 1;
    }
  }
  Sums rounded;
#pragma unroll
  for (u32 i = 0; i < kAtOnce; ++i) {
    Elements elements;
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) elements.of[e] = Number<Element>::encode(sums[i][e]);
    rounded.of[i] = __builtin_bit_cast(Packet, elements);
  }
  return rounded;
}

// Whether a flag follows a part. Packets need none, but values do not show by themselves that they have come.
MPICOMM_DEVICE bool has_flag(const Combine& x, u32 part) { return !kInPackets || (part == 0 && x.values != nullptr); }

// This rank's sums for a part, of all threads of a block. In the layout by expert sums need the registers, so the
// results are in shared memory. In the layout by token a thread only loads, and keeps packets in registers.
struct Shared {
  Packet of[kByToken ? 1 : kPartPackets][kSumThreads];
};

struct OwnSum {
  Packets row;

  // All lanes of the warp call it.
  MPICOMM_DEVICE void take(const LocalRows& local, const Part& part, Shared& shared) {
    if constexpr (kByToken) {
      const u64 from = __shfl_sync(kWarp, reinterpret_cast<u64>(local.row), 0);
      if (from != 0) row.load([&](u64 at) { return reinterpret_cast<const u8*>(from) + at; }, part);
    } else {
#pragma unroll 1
      for (u32 first = 0; first < kPartPackets; first += kAtOnce) {
        const Sums sums = sum_rows(local, part, first);
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) shared.of[first + i][threadIdx.x] = sums.of[i];
      }
    }
  }
  MPICOMM_DEVICE Packets packets(const Shared& shared) const {
    if constexpr (kByToken) return row;
    Packets packets;
#pragma unroll
    for (u32 i = 0; i < kPartPackets; ++i) packets.of[i] = shared.of[i][threadIdx.x];
    return packets;
  }
};

// The sum of this rank for a part of a token of `source`.
struct PeerSum {
  u32 source;
  u32 token;
  u32 part;
  bool is_here;
  i32 value;  // as in LocalRows
  OwnSum sum;
};

MPICOMM_DEVICE void push_sums(const Combine& x, const Launch& launch, Shared& shared) {
  const Experts& experts = x.experts;
  const Team& team = experts.team;
  const u32 lane = threadIdx.x % kLanes;
  const u32 peers = team.size - 1;
  u32 most = 0;
  for (u32 source = 0; source < team.size; ++source) {
    if (source != team.rank && x.tokens[source] > most) most = x.tokens[source];
  }
  // Neighbouring units go to different ranks: see team.cuh.
  const u64 units = static_cast<u64>(most) * experts.parts * peers;
  const auto prepare = [&](u64 unit) {
    PeerSum own;
    const u64 of_peers = quotient(unit, peers);
    own.source = (team.rank + 1 + static_cast<u32>(unit - of_peers * peers)) % team.size;
    own.token = static_cast<u32>(quotient(of_peers, experts.parts));
    own.part = static_cast<u32>(of_peers - static_cast<u64>(own.token) * experts.parts);
    own.is_here = false;
    if (own.token >= x.tokens[own.source]) return own;
    const LocalRows local(x, own.source, own.token, lane);
    own.is_here = local.lanes != 0;
    own.value = local.value;
    if (own.is_here) own.sum.take(local, Part(experts, own.part, lane), shared);
    return own;
  };
  const auto store = [&](const PeerSum& own, u32 number, Unpublished& unpublished) {
    if (!own.is_here) return;
    const u32 recv_slot = recv_slot_of(experts, launch, x.tokens[own.source], own.token);
    u8* const target = row_in(experts, experts.sums, own.source, team.rank, recv_slot);
    const Part range(experts, own.part, lane);
    if constexpr (kInPackets) {
      push_part(own.sum.packets(shared), target, range);
    } else {
      own.sum.packets(shared).store([&](u64 at) { return target + at; }, range);
    }
    // The flag of the first part publishes the values, too.
    if (own.part == 0 && own.value >= 0) values_in(experts, own.source, recv_slot)[lane] = x.values[own.value];
    if (!has_flag(x, own.part)) return;
    unpublished.add(experts, experts.sum_flags, number, 1u << own.source, recv_slot, own.part, lane);
  };
  const auto tokens_at = [&](u32 peer) { return x.tokens[peer]; };
  const auto ready = [&] { return peers_are_ready(experts, kCombine, launch, tokens_at); };
  each_run<false>(experts, launch, units, kByToken, prepare, ready, store);
}

// A part of a token of this rank. This rank adds its rows while the sums of the others are on their way.
struct OwnPart {
  u32 token;
  u32 part;
  Targets targets;
  i32 value;  // as in LocalRows
  OwnSum sum;

  MPICOMM_DEVICE OwnPart(const Combine& x, u64 unit, u32 lane, Shared& shared) {
    const Experts& experts = x.experts;
    token = static_cast<u32>(quotient(unit, experts.parts));
    part = static_cast<u32>(unit - static_cast<u64>(token) * experts.parts);
    const LocalRows local(x, experts.team.rank, token, lane);
    value = local.value;
    sum.take(local, Part(experts, part, lane), shared);
    targets = x.targets[token];
  }
};

MPICOMM_DEVICE bool finish_part(
    const Combine& x, const Launch& launch, const OwnPart& own, u32 lane, const Shared& shared) {
  const Experts& experts = x.experts;
  const Team& team = experts.team;
  const auto [targets, slots] = own.targets;
  const u32 token = own.token, part = own.part, recv_slot = recv_slot_of(experts, launch, x.num_tokens, token);
  const Part range(experts, part, lane);
  bool ok = true;
  if (has_flag(x, part) && lane < team.size && lane != team.rank && (targets >> lane & 1) != 0) {
    const auto has_arrived = [&] { return has_part(experts, experts.sum_flags, launch, lane, recv_slot, part); };
    ok = await_peer(experts, kCombine, launch.number, lane, has_arrived);
  }
  // Orders the loads of all lanes after the acquires.
  __syncwarp();
  if (!__all_sync(kWarp, ok)) return false;
  if (part == 0 && x.values != nullptr && lane < experts.top_k) {
    float value = 0;
    if (own.value >= 0) value = x.values[own.value];
    else if ((slots >> lane & 1) != 0) value = values_in(experts, team.rank, recv_slot)[lane];
    x.slot_values[static_cast<u64>(token) * experts.top_k + lane] = value;
  }
  float sums[kPartPackets][kElements];
#pragma unroll
  for (u32 i = 0; i < kPartPackets; ++i) {
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) sums[i][e] = 0;
  }
  for (u32 from = 0; from < team.size; ++from) {
    if ((targets >> from & 1) == 0) continue;
    Packets packets;
    if (from == team.rank) {
      packets = own.sum.packets(shared);
    } else {
      u8* const row = row_in(experts, experts.sums, team.rank, from, recv_slot);
      if constexpr (kInPackets) {
        if (!take_part(experts, kCombine, launch, from, row, range, packets)) return false;
      } else {
        packets.load([&](u64 at) { return row + at; }, range);
      }
    }
#pragma unroll
    for (u32 i = 0; i < kPartPackets; ++i) {
      if (range.has(i)) add(sums[i], packets.of[i], 1);
    }
  }
#pragma unroll
  for (u32 i = 0; i < kPartPackets; ++i) {
    if (!range.has(i)) continue;
    Results results;
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) results.of[e] = Number<Result>::encode(sums[i][e]);
    const u64 first = (token * experts.row_nbytes + range.at(i)) / sizeof(Element);
    *reinterpret_cast<Results*>(x.output + first * sizeof(Result)) = results;
  }
  return true;
}

MPICOMM_DEVICE void take_sums(const Combine& x, const Launch& launch, Shared& shared) {
  const Experts& experts = x.experts;
  const u32 lane = threadIdx.x % kLanes, of_block = kSumThreads / kLanes;
  const u32 warp = (blockIdx.x - experts.senders) * of_block + threadIdx.x / kLanes;
  const u32 warps = (gridDim.x - experts.senders) * of_block;
  const u64 units = static_cast<u64>(x.num_tokens) * experts.parts;
  // A warp begins with one part, and then takes the next part that no warp has, as in RunsOfWarp.
  for (u64 unit = warp; unit < units;) {
    u32 ticket = 0;
    if (lane == 0 && units > warps) ticket = atomicAdd(tickets(experts, launch.parity(), kOfReceivers), 1);
    if (!finish_part(x, launch, OwnPart(x, unit, lane, shared), lane, shared)) return;
    unit = static_cast<u64>(warps) + __shfl_sync(kWarp, ticket, 0);
    if (units <= warps) return;
  }
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh and experts_dispatch.cu.
extern "C" __global__ void __launch_bounds__(mpicomm::kSumThreads, 2)
    mpicomm_experts_combine(const __grid_constant__ mpicomm::Combine);

MPICOMM_KERNEL void mpicomm_experts_combine(const __grid_constant__ mpicomm::Combine x) {
  __shared__ mpicomm::Shared shared;
  const mpicomm::Launch launch = mpicomm::this_launch(x.experts.team, mpicomm::kCombines);
  if (!mpicomm::begin_launch(x.experts, mpicomm::kCombines, launch)) return;
  if (blockIdx.x < x.experts.senders) {
    mpicomm::push_sums(x, launch, shared);
  } else {
    mpicomm::take_sums(x, launch, shared);
  }
}
