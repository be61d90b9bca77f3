// The units of a worker thread, step by step. Also rows, which packets.cu normalises after it has
// reduced them (norm.cuh).
//
// Usually, with T worker threads, the thread with number n (`number_of`) handles unit k*T + n in step
// k. Rows are the work of groups of kNormThreads workers. Group g of all G groups of the grid owns rows
// g, g+G and so on, and takes m steps for each row. In step p of a row, thread t of the group has packet
// t + p*kNormThreads of the row. It has no packet after the end of a row, which may come within the
// last of the m steps. It has none after the last row. All groups take the same number of steps.
//
// Hence a thread that has a unit in step k > 2 also has a unit in step k-2 or in step k-3. Before
// step k it can lack a unit only in every m-th step. packets.cu needs that.
//
// With fan-out a shard has whole rows. A rank reduces the rows of its shard, adds the residual, and
// sends on h. So only one rank reads each element of the residual, which is the same on all ranks. That
// rank also sends the statistics of each row, before the last packets of the row. Each rank normalises
// the rows of all shards, because each rank keeps all rows of h (received_rows.cuh).
#pragma once

#include "finish.cuh"

namespace mpicomm {

#if defined(MPICOMM_FAN_OUT)
constexpr bool kFanOut = true;
#else
constexpr bool kFanOut = false;
#endif

// Whether there is only one step. A kernel for one step has no loop, because fetching the code of
// the loop would take a large part of a short launch.
#if defined(MPICOMM_ONE_STEP)
constexpr bool kOneStep = true;
#else
constexpr bool kOneStep = false;
#endif

// The shards whose rows this rank normalises. In one hop there is only one shard.
constexpr u32 kShards = kFanOut ? MPICOMM_RANKS : 1;

// The number of a worker among the workers of the grid. In one step the warps of all blocks take turns.
// A launch for messages of any length has more threads than short messages have units, and so all
// multiprocessors share the loads and stores of these.
MPICOMM_DEVICE u64 number_of(u32 worker, u32 workers) {
  if (!kOneStep) return static_cast<u64>(blockIdx.x) * workers + worker;
  return (static_cast<u64>(worker / kLanes) * gridDim.x + blockIdx.x) * kLanes + worker % kLanes;
}

#if defined(MPICOMM_WEIGHT)

static_assert(kUnitNbytes == kPacketNbytes, "the order of squares is an order of packets");
constexpr bool kRows = true;

// The groups of a block for which there are registers. The host's copy is in configs.py; a test
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

  // The offset of this thread's unit in step `each` of row `of`.
  MPICOMM_DEVICE u64 at(u64 of, u32 each) const {
    const u64 packet = packet_of(each);
    return of < norm.rows_of_shard && packet < packets() ? (of * packets() + packet) * kPacketNbytes : kNoUnit;
  }
  MPICOMM_DEVICE bool ends(u32 each) const { return each == parts - 1; }
  MPICOMM_DEVICE u64 first() const { return at(row, 0); }
  MPICOMM_DEVICE u64 after(u64) {
    if (++part == parts) part = 0, row += groups;
    return at(row, part);
  }
  MPICOMM_DEVICE static void step_back(u64, u64&, u64&) {}  // this step does not determine the earlier steps
};

// The packets of h in the first kKept steps of a row stay in shared memory until the row ends. A thread
// reads later packets from the residual. A kernel has 48 KiB, and more than 4 steps are rare.
constexpr u32 kStepNbytes = kShards * kNormThreads * kPacketNbytes;
constexpr u32 kOtherNbytes = sizeof(Sums) + 2 * kShards * kPacketNbytes;
constexpr u32 kMostKept = (48 * 1024 / kGroups - kOtherNbytes) / kStepNbytes;
constexpr u32 kKept = kMostKept < 4 ? kMostKept : 4;

// The shared memory of a group.
struct RowMemory {
  Sums sums;
  Packet statistics[2][kShards];  // of the rows of other ranks; two rows of a shard use them in turns
  Packet kept[kKept > 0 ? kKept * kShards * kNormThreads : 1];  // by step, shard and thread
};

// Loads and stores the packet at an address. Rows are whole packets.
MPICOMM_DEVICE Packet load_whole(const u8* from) {
  const u32 width = width_of(from);
  return kAligned || width == kPacketNbytes ? load_aligned(from) : load_narrow(from, width, kPacketNbytes);
}
MPICOMM_DEVICE void store_whole(u8* to, const Packet& packet) {
  const u32 width = width_of(to);
  if (kAligned || width == kPacketNbytes) store_aligned(to, packet);
  else store_narrow(to, packet, width, kPacketNbytes);
}

// One thread's part in the rows that its rank reduces. `course` is at the step of stage B.
struct Rows {
  const Norm& norm;
  RowMemory& memory;
  Course course;
  u32 own;       // the shard that this rank reduces
  u32 barrier;   // of the group
  u32 turn = 0;  // the index of the sums that this row uses
  State sum = 0;

  MPICOMM_DEVICE Rows(const Finish& finish, RowMemory* all, u32 rank, u32 worker, u32 workers)
      : norm(finish.norm),
        memory(all[worker / kNormThreads]),
        course(finish, worker, workers),
        own(kFanOut ? rank : 0),
        barrier(1 + worker / kNormThreads) {}

  MPICOMM_DEVICE u64 row_of(u32 shard, u64 row) const { return shard * norm.rows_of_shard + row; }
  MPICOMM_DEVICE bool has_row(u32 shard, u64 row) const {
    return row < norm.rows_of_shard && row_of(shard, row) < norm.rows;
  }
  MPICOMM_DEVICE u8* h_at(u32 shard, u64 at) const {
    return norm.residual + shard * norm.rows_of_shard * norm.hidden * sizeof(Element) + at;
  }
  MPICOMM_DEVICE Packet& kept(u32 part, u32 shard) const {
    return memory.kept[(part * kShards + shard) * kNormThreads + course.thread];
  }

  MPICOMM_DEVICE Packet load_residual(u64 at) const { return load_whole(h_at(own, at)); }

  // Stores the unit of h at offset `at` of a shard, in step `part` of its row.
  MPICOMM_DEVICE void store(u32 shard, u32 part, u64 at, const Packet& h) const {
    store_whole(h_at(shard, at), h);
    if (part < kKept) kept(part, shard) = h;
  }

  // Loads a unit of h that this thread has stored.
  MPICOMM_DEVICE Packet load(u32 shard, u32 part, u64 at) const {
    return part < kKept ? kept(part, shard) : load_whole(h_at(shard, at));
  }

  // Returns the unit of h at offset `at`, after it has stored it, from the reduced unit and the residual there.
  MPICOMM_DEVICE Packet add(u64 at, const Packet& reduced, const Packet& residual) {
    const Packet h =
        with_residual(norm, course.packet_of(course.part) * kElements, kElements, reduced, residual);
    sum = with_summands(sum, h, kElements);
    store(own, course.part, at, h);
    return h;
  }

  MPICOMM_DEVICE bool ends() const { return course.ends(course.part); }
  MPICOMM_DEVICE bool has_row() const { return has_row(own, course.row); }

  // Finds the statistics of the row that ends with this step. Returns false if the thread must leave.
  MPICOMM_DEVICE bool end_row(Statistics& of) {
    memory.sums.of[turn][course.thread] = sum;
    sum = 0;
    if (!row_barrier(barrier, true)) return false;
    if (has_row()) {
      const State total = total_of(memory.sums.of[turn], course.thread);
      of = statistics_of(norm, memory.sums, total, course.thread, barrier, PacketsOfH{*this});
    }
    turn ^= 1;
    return true;
  }

  MPICOMM_DEVICE void normalise(const Statistics& of) const {
    if (has_row()) normalise_row(norm, row_of(own, course.row), of, course.thread, PacketsOfH{*this});
  }

  struct PacketsOfH {
    const Rows& rows;

    // Calls a function for each packet of h: see `statistics_of`.
    template <class Work>
    MPICOMM_DEVICE void operator()(const Work& work) const {
      const Course& course = rows.course;
#pragma unroll 1
      for (u32 part = 0; part < course.parts; ++part) {
        const u64 at = course.at(course.row, part);
        const bool has_unit = at != kNoUnit;
        if (!kScaledGroups && !has_unit) continue;
        Packet h{};
        if (has_unit) h = rows.load(rows.own, part, at);
        work(course.packet_of(part) * kElements, h, !kScaledGroups || has_unit ? kElements : 0);
      }
    }
  };
};

#else

constexpr bool kRows = false;

struct Course {
  u64 begin, step_nbytes;

  MPICOMM_DEVICE Course(const Finish&, u32 worker, u32 workers)
      : begin(number_of(worker, workers) / kSharers * kSharers * kCarriedNbytes),
        step_nbytes(static_cast<u64>(gridDim.x) * workers * kCarriedNbytes) {}

  MPICOMM_DEVICE u64 first() const { return begin; }
  MPICOMM_DEVICE u64 after(u64 at) const { return at + step_nbytes; }
  MPICOMM_DEVICE void step_back(u64 a_at, u64& b_at, u64& c_at) const {
    b_at = a_at - step_nbytes;
    c_at = b_at - step_nbytes;
  }
};

struct RowMemory {};

#endif

}  // namespace mpicomm
