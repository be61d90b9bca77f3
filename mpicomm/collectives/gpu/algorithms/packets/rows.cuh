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
// With fan-out a shard has whole rows. A rank reduces the rows of its shard and sends them on as they
// are. Each rank normalises the rows of all shards, because each rank has a residual of all rows.
// So a thread has the same unit of each shard. It ends the rows of all shards together, in the turn
// after their last stage C.
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
constexpr u32 kGroups = MPICOMM_RANKS > 2 || kFanOut ? 1 : 2;

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

constexpr u32 kAtOnce = kTogether<kShards>;

// The packets of h in the first kKept steps of a row stay in shared memory until the row ends. A thread
// reads later packets from the residual. A kernel has 48 KiB, and more than 4 steps are rare.
constexpr u32 kStepNbytes = kShards * kNormThreads * kPacketNbytes;
constexpr u32 kMostKept = (48 * 1024 / kGroups - sizeof(Sums<kShards>)) / kStepNbytes;
constexpr u32 kKept = kMostKept < 4 ? kMostKept : 4;

// The shared memory of a group.
struct RowMemory {
  Sums<kShards> sums;
  Elements kept[kKept > 0 ? kKept * kShards * kNormThreads : 1];  // by step, shard and thread
};

// Whether rows end in the next turn, or else in the turn of their last step.
constexpr bool kEndsLater = kFanOut;

// One thread's part in the ends of its rows. `course` is at the step of stage B, or with fan-out at
// the step of stage C.
struct Rows {
  const Norm& norm;
  RowMemory& memory;
  Course course;
  u32 barrier;   // of the group
  u32 turn = 0;  // the index of the sums that these rows use
  bool ends = false;  // whether the rows of the last step end in this turn
  State sum[kShards] = {};

  MPICOMM_DEVICE Rows(const Finish& finish, RowMemory* all, u32 worker, u32 workers)
      : norm(finish.norm),
        memory(all[worker / kNormThreads]),
        course(finish, worker, workers),
        barrier(1 + worker / kNormThreads) {}

  MPICOMM_DEVICE u64 nbytes() const { return norm.rows * norm.hidden * sizeof(Element); }
  MPICOMM_DEVICE u64 first_of(u32 shard) const { return shard * norm.rows_of_shard * norm.hidden * sizeof(Element); }
  MPICOMM_DEVICE u64 row_of(u32 shard) const { return shard * norm.rows_of_shard + course.row; }
  MPICOMM_DEVICE bool has_row(u32 shard) const {
    return course.row < norm.rows_of_shard && row_of(shard) < norm.rows;
  }

  MPICOMM_DEVICE Packet load_residual(u32 shard, u64 at) const {
    return load_unit(norm.residual, width_of(norm.residual), first_of(shard) + at, nbytes());
  }

  MPICOMM_DEVICE Elements& kept(u32 part, u32 shard) const {
    return memory.kept[(part * kShards + shard) * kNormThreads + course.thread];
  }

  // Loads the residual at offset `at` of each of `shards`, which are bits.
  MPICOMM_DEVICE void load_residuals(Packet (&residuals)[kShards], u32 shards, u64 at) const {
#pragma unroll
    for (u32 shard = 0; shard < kShards; ++shard) {
      if (shards >> shard & 1) residuals[shard] = load_residual(shard, at);
    }
  }

  // Takes the reduced unit at offset `at` of a shard, and the residual there.
  MPICOMM_DEVICE void add(u32 shard, u64 at, const Packet& reduced, const Packet& residual) {
    const auto value = __builtin_bit_cast(Elements, reduced), old = __builtin_bit_cast(Elements, residual);
    const Elements h = with_residual(norm, course.packet_of(course.part) * kElements, kElements, value, old);
    sum[shard] = with_summands(sum[shard], h, kElements);
    const u64 to = first_of(shard) + at;
    store_unit(norm.residual, width_of(norm.residual), to, nbytes(), __builtin_bit_cast(Packet, h));
    if (course.part < kKept) kept(course.part, shard) = h;
  }

  // Ends a step. The rows end after their last step. `ok` is whether the thread has taken all
  // awaited packets. If not, it goes to the barrier of the row at once. The other threads of its
  // group come there at the end of the row, and all of them leave together. Returns false if the
  // thread must leave.
  MPICOMM_DEVICE bool end_step(bool ok) {
    if (!ok) return meet_at_end(barrier, false);
    ends = course.part == course.parts - 1;
    if (!ends) course.after(0);
    return kEndsLater || end_rows();
  }

  // Normalises the rows of the last step, if they end. Returns false if the thread must leave.
  MPICOMM_DEVICE bool end_rows() {
    if (!ends) return true;
#pragma unroll
    for (u32 shard = 0; shard < kShards; ++shard) {
      memory.sums.of[turn][shard][course.thread] = sum[shard];
      sum[shard] = 0;
    }
    if (!meet_at_end(barrier, true)) return false;
#pragma unroll 1
    for (u32 first = 0; first < kShards && has_row(first); first += kAtOnce) {
      u64 rows[kAtOnce];
      Statistics of[kAtOnce];
      u32 present = 0;
#pragma unroll
      for (u32 each = 0; each < kAtOnce; ++each) {
        const u32 shard = first + each;
        rows[each] = row_of(shard), present += has_row(shard);
        const State total = total_of(memory.sums.of[turn][shard], course.thread);
        const u32 place = (turn + shard) % 2;
        of[each] = statistics_of(
            norm, memory.sums, total, place, course.thread, barrier, rows[each], PacketsOfH{*this, first, 1});
      }
      normalise_rows(norm, rows, present, of, PacketsOfH{*this, first, present});
    }
    turn ^= 1, ends = false;
    course.after(0);
    return true;
  }

  struct PacketsOfH {
    const Rows& rows;
    u32 first;    // the shards whose rows end together: the first of them, and how many have a row
    u32 present;

    // Calls a function for each packet of h: see `statistics_of`.
    template <class Work>
    MPICOMM_DEVICE void operator()(const Work& work) const {
      const u32 last = rows.course.parts - 1;
#pragma unroll 1
      for (u32 part = 0; part <= last; ++part) {
        const u64 at = rows.course.at(part);
        Elements h[kAtOnce];
#pragma unroll
        for (u32 each = 0; each < kAtOnce; ++each) {
          h[each] = {};
          if (at == kNoUnit || each >= present) continue;
          // The loads see the stores of `add`, because this thread has made them.
          if (part < kKept) h[each] = rows.kept(part, first + each);
          else h[each] = __builtin_bit_cast(Elements, rows.load_residual(first + each, at));
        }
        work(rows.course.packet_of(part) * kElements, h, at == kNoUnit ? 0 : kElements);
      }
    }
  };
};

#else

constexpr bool kRows = false;
constexpr bool kEndsLater = false;

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

struct RowMemory {};
struct Rows {
  MPICOMM_DEVICE Rows(const Finish&, RowMemory*, u32, u32) {}
  MPICOMM_DEVICE static void load_residuals(Packet (&)[kShards], u32, u64) {}
  MPICOMM_DEVICE static void add(u32, u64, const Reduced&, const Packet&) {}
  MPICOMM_DEVICE static bool end_step(bool ok) { return ok; }
  MPICOMM_DEVICE static bool end_rows() { return true; }
};

#endif

}  // namespace mpicomm
