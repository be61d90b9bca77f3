// The units of a worker thread, step by step. Also rows, which packets.cu normalises after it has
// reduced them (norm.cuh).
//
// Usually, with T worker threads, thread n handles unit k*T + n in step k. Rows are the work of
// groups of kNormThreads workers. Group g of all G groups of the grid owns rows g, g+G and so on,
// and takes m steps for each row. In step p of a row, thread t of the group has packet t +
// p*kNormThreads of the row. It has no packet after the end of a row, which may come within the
// last of the m steps. It has none after the last row. All groups take the same number of steps.
//
// Hence a thread that has a unit in step k > 2 also has a unit in step k-2 or in step k-3. Before
// step k it can lack a unit only in every m-th step. packets.cu needs that.
//
// With fan-out a shard has whole rows, and the ranks place reduced rows as without an epilogue. Each
// rank then normalises the rows of all shards, because each rank has a residual of all rows. So a
// thread has the same unit of each shard. It ends the rows of all shards together, after stage C. It
// loads their reduced units again then, because it lacks the registers to keep them.
#pragma once

#include "finish.cuh"

namespace mpicomm {

#if defined(MPICOMM_FAN_OUT)
constexpr bool kFanOut = true;
#else
constexpr bool kFanOut = false;
#endif

// The shards whose rows this rank normalises. In one hop it normalises the rows that it reduces.
constexpr u32 kShards = kFanOut ? MPICOMM_RANKS : 1;

#if defined(MPICOMM_WEIGHT)

static_assert(kUnitNbytes == kPacketNbytes, "the order of squares is an order of packets");
constexpr bool kRows = true;

// The groups of a block for which there are registers. The host's copy is in rows.py; a test
// compares them.
constexpr u32 kGroups = MPICOMM_RANKS > 2 ? 1 : 2;

constexpr u64 kNoUnit = ~0ull;  // an offset beyond every message

struct Course {
  const Norm& norm;
  u64 row;     // of this step
  u64 groups;  // of the grid
  u32 thread;  // of the group
  u32 parts;   // steps of a row
  u32 part = 0;

  MPICOMM_DEVICE Course(const Finish& finish, u32 worker, u32 workers)
      : norm(finish.norm),
        row(worker / kNormThreads * gridDim.x + blockIdx.x),
        groups(workers / kNormThreads * gridDim.x),
        thread(worker % kNormThreads),
        parts(static_cast<u32>((packets() + kNormThreads - 1) / kNormThreads)) {}

  MPICOMM_DEVICE u64 packets() const { return norm.hidden / kElements; }  // of a row; the host ensures whole packets
  MPICOMM_DEVICE u64 packet_of(u32 each) const { return static_cast<u64>(each) * kNormThreads + thread; }

  // The offset of this thread's unit in step `each` of this row.
  MPICOMM_DEVICE u64 at(u32 each) const {
    const u64 packet = packet_of(each);
    return row < norm.rows_of_shard && packet < packets() ? (row * packets() + packet) * kPacketNbytes : kNoUnit;
  }
  MPICOMM_DEVICE u64 first() const { return at(0); }
  MPICOMM_DEVICE u64 after(u64) {
    if (++part == parts) part = 0, row += groups;
    return at(part);
  }
  MPICOMM_DEVICE static void look_back(u64, u64&, u64&) {}  // this step does not determine the earlier steps
};

// Whether rows end in stage B, or else in stage C.
constexpr bool kEndsInB = !kFanOut;

using RowSums = Sums<kShards>;

// A thread's part in the rows with one number in all shards, after all reduced units are in place.
struct EndsOfRows {
  Norm norm;   // a copy, because a function that is not inlined would load the kernel's argument from far away
  u64 number;  // of the row in each shard
  u32 thread;  // of the group

  static constexpr u32 kAtOnce = 2;  // units whose loads are in flight together

  // Numbers of rows and offsets of units in the whole arrays.
  MPICOMM_DEVICE u64 row(u32 shard) const { return shard * norm.rows_of_shard + number; }
  MPICOMM_DEVICE bool has_row(u32 shard) const { return number < norm.rows_of_shard && row(shard) < norm.rows; }
  MPICOMM_DEVICE u64 packets() const { return norm.hidden / kElements; }
  MPICOMM_DEVICE u64 at(u32 shard, u64 packet) const { return (row(shard) * packets() + packet) * kPacketNbytes; }
  MPICOMM_DEVICE u64 nbytes() const { return norm.rows * packets() * kPacketNbytes; }
  MPICOMM_DEVICE Elements load(const u8* array, u64 at) const {
    return __builtin_bit_cast(Elements, load_unit(array, width_of(array), at, nbytes()));
  }

  // Calls `load` for a few packets of this thread in a row, so that their loads are in flight
  // together, and then `work` for the same packets, until there are no more. All threads of a warp
  // make equally many calls of `work`. A call for a packet beyond the row gets an empty unit.
  template <class Unit, class Load, class Work>
  MPICOMM_DEVICE void for_each_packet(const Load& load, const Work& work) const {
    const u32 lane = thread % kLanes;
#pragma unroll 1
    for (u64 first = thread; first - lane < packets(); first += kAtOnce * kNormThreads) {
      Unit units[kAtOnce]{};
#pragma unroll
      for (u32 each = 0; each < kAtOnce; ++each) {
        if (first + each * kNormThreads < packets()) units[each] = load(first + each * kNormThreads);
      }
#pragma unroll
      for (u32 each = 0; each < kAtOnce; ++each) {
        if (first + each * kNormThreads - lane < packets()) work(first + each * kNormThreads, units[each]);
      }
    }
  }

  // Adds the residual to the packets of a row. Returns the sum that `meet_at_end` needs.
  MPICOMM_DEVICE State add(u32 shard) const {
    struct Summands {
      Elements reduced, residual;
    };
    State sum = 0;
    const auto load_both = [&](u64 packet) {
      return Summands{load(norm.reduced, at(shard, packet)), load(norm.residual, at(shard, packet))};
    };
    for_each_packet<Summands>(load_both, [&](u64 packet, const Summands& both) {
      if (packet >= packets()) return;
      const Elements h = with_residual(norm, packet * kElements, kElements, both.reduced, both.residual);
      sum = with_summands(sum, h, kElements);
      const Packet stored = __builtin_bit_cast(Packet, h);
      store_unit(norm.residual, width_of(norm.residual), at(shard, packet), nbytes(), stored);
    });
    return sum;
  }

  MPICOMM_DEVICE void normalise(u32 shard, RowSums& sums, u32 turn, u32 barrier) const {
    end_row(norm, sums, shard, turn, thread, barrier, row(shard), PacketsOfH{*this, shard});
  }

  struct PacketsOfH {
    const EndsOfRows& rows;
    u32 shard;

    // Calls a function for each packet of h: see `end_row`.
    template <class Work>
    MPICOMM_DEVICE void operator()(const Work& work) const {
      const auto load_h = [&](u64 packet) { return rows.load(rows.norm.residual, rows.at(shard, packet)); };
      rows.for_each_packet<Elements>(load_h, [&](u64 packet, const Elements& h) {
        work(packet * kElements, h, packet < rows.packets() ? kElements : 0);
      });
    }
  };
};

// Ends rows of all shards, as `Rows::end_step`. Not inlined, because the loop of turns needs its
// registers.
MPICOMM_DEVICE_CALL bool end_rows(const EndsOfRows& rows, RowSums& sums, u32 turn, u32 barrier, bool ok) {
#pragma unroll 1
  for (u32 shard = 0; shard < kShards; ++shard) {
    sums.of[turn][shard][rows.thread] = ok && rows.has_row(shard) ? rows.add(shard) : State{};
  }
  if (!meet_at_end(barrier, ok)) return false;
#pragma unroll 1
  for (u32 shard = 0; shard < kShards && rows.has_row(shard); ++shard) rows.normalise(shard, sums, turn, barrier);
  return true;
}

// One thread's part in the ends of its rows, in stage B or in stage C. `course` lags the course of
// stage A by as many steps.
struct Rows {
  const Norm& norm;
  RowSums& sums;
  Course course;
  u32 barrier;   // of the group
  u32 turn = 0;  // the index of the sums that these rows use
  State sum = 0;  // of a row that ends in stage B
  Elements h{};   // of its last unit

  MPICOMM_DEVICE Rows(const Finish& finish, RowSums* all, u32 worker, u32 workers)
      : norm(finish.norm),
        sums(all[worker / kNormThreads]),
        course(finish, worker, workers),
        barrier(1 + worker / kNormThreads) {}

  MPICOMM_DEVICE u64 nbytes() const { return norm.rows * norm.hidden * sizeof(Element); }

  MPICOMM_DEVICE Packet load_residual(u64 at) const {
    return load_unit(norm.residual, width_of(norm.residual), at, nbytes());
  }

  // Takes the reduced unit at offset `at`, and the residual there.
  MPICOMM_DEVICE void add(u64 at, const Packet& reduced, const Packet& residual) {
    const auto value = __builtin_bit_cast(Elements, reduced), old = __builtin_bit_cast(Elements, residual);
    h = with_residual(norm, course.packet_of(course.part) * kElements, kElements, value, old);
    sum = with_summands(sum, h, kElements);
    store_unit(norm.residual, width_of(norm.residual), at, nbytes(), __builtin_bit_cast(Packet, h));
  }

  // Ends a step. The last step of a row normalises the row. `ok` is whether the thread has taken
  // all awaited packets. If not, it goes to the barrier of the row at once. The other threads of
  // its group wait for it there, and all of them leave together. Returns false if the thread must
  // leave.
  MPICOMM_DEVICE bool end_step(bool ok) {
    const u32 last = course.parts - 1;
    if (course.part == last || !ok) {
      if constexpr (kEndsInB) {
        sums.of[turn][0][course.thread] = sum;
        if (!meet_at_end(barrier, ok)) return false;
        if (course.row < norm.rows_of_shard) normalise();
        sum = 0;
      } else if (!end_rows({norm, course.row, course.thread}, sums, turn, barrier, ok)) {
        return false;
      }
      turn ^= 1;
    }
    course.after(0);
    return true;
  }

  MPICOMM_DEVICE void normalise() const {
    end_row(norm, sums, 0, turn, course.thread, barrier, course.row, PacketsOfH{*this});
  }

  struct PacketsOfH {
    const Rows& rows;

    // Calls a function for each packet of h: see `end_row`.
    template <class Work>
    MPICOMM_DEVICE void operator()(const Work& work) const {
      const u32 last = rows.course.parts - 1;
#pragma unroll 1
      for (u32 part = 0; part <= last; ++part) {
        const u64 at = rows.course.at(part);
        Elements elements = rows.h;
        // The loads see the stores of `add`, because this thread has made them.
        if (part < last && at != kNoUnit) elements = __builtin_bit_cast(Elements, rows.load_residual(at));
        work(rows.course.packet_of(part) * kElements, elements, at == kNoUnit ? 0 : kElements);
      }
    }
  };
};

#else

constexpr bool kRows = false;
constexpr bool kEndsInB = false;

struct Course {
  u64 begin, step_nbytes;

  MPICOMM_DEVICE Course(const Finish&, u32 worker, u32 workers)
      : begin((static_cast<u64>(blockIdx.x) * workers + worker) / kSharers * kSharers * kCarriedNbytes),
        step_nbytes(static_cast<u64>(gridDim.x) * workers * kCarriedNbytes) {}

  MPICOMM_DEVICE u64 first() const { return begin; }
  MPICOMM_DEVICE u64 after(u64 at) const { return at + step_nbytes; }
  MPICOMM_DEVICE void look_back(u64 a_at, u64& b_at, u64& c_at) const {
    b_at = a_at - step_nbytes;
    c_at = b_at - step_nbytes;
  }
};

struct RowSums {};
struct Rows {
  MPICOMM_DEVICE Rows(const Finish&, RowSums*, u32, u32) {}
  MPICOMM_DEVICE static Packet load_residual(u64) { return {}; }
  MPICOMM_DEVICE static void add(u64, const Reduced&, const Packet&) {}
  MPICOMM_DEVICE static bool end_step(bool ok) { return ok; }
};

#endif

}  // namespace mpicomm
