// The receivers of a dispatch: they give each pair a place, describe the places, and copy rows. The top of
// experts_dispatch.cu explains the layouts.
#pragma once

#include "experts_counts.cuh"

namespace mpicomm {

struct Receiver : Counts {
  MPICOMM_DEVICE u32 first_expert() const { return x.experts.first_experts[rank()]; }
  MPICOMM_DEVICE u32 end_expert() const { return x.experts.first_experts[rank() + 1]; }
  // The place of an expert of this rank, or the end of the last expert.
  MPICOMM_DEVICE u32 offset_of(u32 expert) const { return layout.offsets[expert] - layout.offsets[first_expert()]; }

  // Gives each pair of this block a place, and describes the places.
  MPICOMM_DEVICE bool place_pairs(const Pair& packet) const {
    u32* const next = layout.histograms[warp];
    return each_step(packet, [&](const LanePair& pair, u32 same_expert) {
      const bool here = pair.owner == rank();
      const u32 lower = __popc(same_expert & lower_lanes());
      i32 place = -1;
      if (here) place = static_cast<i32>(offset_of(pair.expert) + next[pair.expert] + lower);
      __syncwarp();
      if (here && lower == 0) next[pair.expert] += __popc(same_expert);
      __syncwarp();
      if (pair.exists) x.places[pair_of(pair.route)] = place;
      if (here) describe(place, pair.route.source, pair.route.token, pair.route.slot, float_of(pair.weight));
      if (by_token()) place_token(pair, place, next[num_experts(x.experts) + rank()]);
    });
  }

  MPICOMM_DEVICE void describe(u64 place, i32 source, i32 token, i32 slot, float weight) const {
    x.sources[3 * place] = source;
    x.sources[3 * place + 1] = token;
    x.sources[3 * place + 2] = slot;
    x.place_weights[place] = weight;
  }

  // Gives each token of a step a row, and describes it. `next` is the next row of the warp.
  MPICOMM_DEVICE void place_token(const LanePair& pair, i32 place, u32& next) const {
    const u32 top_k = x.experts.top_k;
    const u32 rows = row_lanes(pair, rank());
    const u32 lanes = rows >> (lane - slot) & ((1ull << top_k) - 1);
    i32 row = -1;
    if (pair.exists && lanes != 0) row = static_cast<i32>(next + __popc(rows & earlier_tokens()));
    __syncwarp();
    if (lane == 0) next += __popc(rows);
    __syncwarp();
    if (pair.exists && pair.route.slot == 0) x.token_rows[token_at(pair.route)] = row;
    if (row < 0) return;
    const u64 of_row = static_cast<u64>(row) * top_k + slot;
    x.slot_ids[of_row] = place >= 0 ? static_cast<i32>(pair.expert - first_expert()) : -1;
    x.slot_weights[of_row] = place >= 0 ? float_of(pair.weight) : 0;
    if (place >= 0) x.place_rows[place] = row;
  }

  MPICOMM_DEVICE void clear(u8* memory, u64 nbytes) const {
    for (u64 at = thread * kPacketNbytes; at < nbytes; at += blockDim.x * kPacketNbytes) store_aligned(memory + at, {});
  }

  // Describes a place without a pair.
  MPICOMM_DEVICE void leave_out(u64 place) const {
    describe(place, -1, -1, -1, 0);
    if (by_token()) x.place_rows[place] = -1;
  }

  // Fills the places that no pair has. In the layout by expert, rows before the next expert become zero,
  // because products of whole groups read them.
  MPICOMM_DEVICE void fill_gaps() const {
    const u32 first = first_expert(), end = end_expert();
    for (u32 expert = first + block; expert < end; expert += blocks) {
      const u64 begin = offset_of(expert), used = begin + layout.totals[expert], following = offset_of(expert + 1);
      if (thread == 0) {
        x.counts[expert - first] = static_cast<i32>(layout.totals[expert]);
        x.offsets[expert - first] = static_cast<i32>(begin);
      }
      for (u64 place = used + thread; place < following; place += blockDim.x) leave_out(place);
      if (by_token()) continue;
      clear(x.rows.first + used * x.rows.first_nbytes, (following - used) * x.rows.first_nbytes);
      clear(x.rows.second + used * x.rows.second_nbytes, (following - used) * x.rows.second_nbytes);
    }
    const u64 number = static_cast<u64>(block) * blockDim.x + thread, threads = static_cast<u64>(blocks) * blockDim.x;
    if (number == 0) x.offsets[end - first] = static_cast<i32>(offset_of(end));
    for (u64 place = offset_of(end) + number; place < x.all_places; place += threads) leave_out(place);
    if (!by_token()) return;
    if (number == 0) *x.row_count = static_cast<i32>(rows_of(rank()));
    const u64 slots = x.capacity * x.experts.top_k;
    for (u64 slot = static_cast<u64>(rows_of(rank())) * x.experts.top_k + number; slot < slots; slot += threads) {
      x.slot_ids[slot] = -1;
      x.slot_weights[slot] = 0;
    }
  }

  // Copies the rows of this block's tokens to their places. Each lane waits for a part, and the warp copies
  // parts in the order in which they come. First come the tokens of this rank.
  MPICOMM_DEVICE void copy_arrived_rows() const {
    const Experts& experts = x.experts;
    const u32 parts = experts.parts, first = shares.block_begin;
    const u64 units = static_cast<u64>(shares.block_end - first) * parts;
    // Neighbouring parts come together, so different warps copy them.
    for (u64 base = warp; base < units; base += kLanes * kWarps) {
      const u64 unit = base + lane * kWarps;
      const u32 of_block = static_cast<u32>(quotient(unit, parts));
      const u32 part = static_cast<u32>(unit - static_cast<u64>(of_block) * parts);
      Route route{};
      bool pending = false;
      if (unit < units) {
        route = token_of(first + of_block);
        pending = exists(route) && is_here(route);
      }
      const auto has_arrived = [&] {
        return route.source == rank() ||
               has_part(experts, experts.row_flags, launch, route.source, recv_slot(route), part);
      };
      while (__any_sync(kWarp, pending)) {
        const u32 come = await_any(experts, kDispatch, launch.number, route.source, pending, has_arrived);
        if (come == 0) return;
        // Orders the loads of all lanes after the acquires.
        __syncwarp();
        if ((come >> lane & 1) != 0) pending = false;
        for (u32 left = come; left != 0; left &= left - 1) {
          const u32 of = __ffs(left) - 1;
          const Route taken{__shfl_sync(kWarp, route.source, of), __shfl_sync(kWarp, route.token, of), 0};
          copy_part(taken, __shfl_sync(kWarp, part, of));
        }
      }
    }
  }

  // Whether a token has an expert of this rank.
  MPICOMM_DEVICE bool is_here(const Route& route) const {
    if (by_token()) return x.token_rows[token_at(route)] >= 0;
    bool is_here = false;
    for (u32 slot = 0; slot < x.experts.top_k; ++slot) is_here |= x.places[pair_of(route) + slot] >= 0;
    return is_here;
  }

  // The row of a token for this lane, or -1. A token has one row in the layout by token, and one for each
  // pair otherwise.
  MPICOMM_DEVICE i32 row_on_lane(const Route& route) const {
    if (by_token()) return lane == 0 ? x.token_rows[token_at(route)] : -1;
    return lane < x.experts.top_k ? x.places[pair_of(route) + lane] : -1;
  }

  MPICOMM_DEVICE void copy_part(const Route& route, u32 part) const {
    const Experts& experts = x.experts;
    const Part range(experts, part, lane);
    Packets packets;
    if (route.source == rank()) {
      packets.load([&](u64 at) { return x.x.at(route.token, at); }, range);
    } else {
      const u8* const from = row_in(experts, experts.rows, rank(), route.source, recv_slot(route));
      packets.load([&](u64 at) { return from + at; }, range);
    }
    const i32 row = row_on_lane(route);
    for (u32 left = __ballot_sync(kWarp, row >= 0); left != 0; left &= left - 1) {
      const u64 to = static_cast<u64>(__shfl_sync(kWarp, row, __ffs(left) - 1));
      packets.store([&](u64 at) { return x.rows.at(to, at); }, range);
    }
  }

  // Gives places, and describes them. All threads of the block go on or leave together.
  MPICOMM_DEVICE bool give_places() const {
    Pair packet;
    if (!place_experts(packet)) return false;
    // The barrier also orders the places of all warps before the loads in `copy_arrived_rows`.
    if (!__syncthreads_and(place_pairs(packet))) return false;
    fill_gaps();
    return true;
  }

  MPICOMM_DEVICE void run() {
    clear_counts();
    if (count_tokens() && give_places()) copy_arrived_rows();
  }
};

}  // namespace mpicomm
