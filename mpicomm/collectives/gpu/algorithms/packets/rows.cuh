// The units of a worker thread, step by step. Also rows, which packets.cu normalises after it has
// reduced them (rms_norm.cuh).
//
// Usually, with T worker threads, thread n handles unit k*T + n in step k. Rows are the work of
// groups of kNormThreads workers. Group g of all G groups of the grid owns rows g, g+G and so on,
// and takes m steps for each row. In step p of a row, thread t of the group has packet t +
// p*kNormThreads of the row. It has no packet after the end of a row, which may come within the
// last of the m steps. It has none after the last row. All groups take the same number of steps.
//
// Hence a thread that has a unit in step k > 2 also has a unit in step k-2 or in step k-3. Before
// step k it can lack a unit only in every m-th step. packets.cu needs that.
#pragma once

#include "finish.cuh"

namespace mpicomm {

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
    return row < norm.rows && packet < packets() ? (row * packets() + packet) * kPacketNbytes : kNoUnit;
  }
  MPICOMM_DEVICE u64 first() const { return at(0); }
  MPICOMM_DEVICE u64 after(u64) {
    if (++part == parts) part = 0, row += groups;
    return at(part);
  }
  MPICOMM_DEVICE static void look_back(u64, u64&, u64&) {}  // this step does not determine the earlier steps
};

// One thread's part in the ends of its rows, in stage B. `course` lags the course of stage A by one
// step.
struct Rows {
  const Norm& norm;
  Sums& sums;
  Course course;
  u32 barrier;   // of the group
  u32 turn = 0;  // the index of the sum that this row uses
  State sum = 0;
  Elements h{};  // of the last unit

  MPICOMM_DEVICE Rows(const Finish& finish, Sums* all, u32 worker, u32 workers)
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
    h = with_residual(__builtin_bit_cast(Elements, reduced), __builtin_bit_cast(Elements, residual));
    sum = with_squares(sum, h, kElements);
    store_unit(norm.residual, width_of(norm.residual), at, nbytes(), __builtin_bit_cast(Packet, h));
  }

  // Ends a step. The last step of a row normalises the row. `ok` is whether the thread has taken
  // all awaited packets. If not, it goes to the barrier of the row at once. The other threads of
  // its group wait for it there, and all of them leave together. Returns false if the thread must
  // leave.
  MPICOMM_DEVICE bool end_step(bool ok) {
    const u32 last = course.parts - 1;
    if (course.part == last || !ok) {
      State root = 0;
      if (!meet_at_end(norm, sums, course.thread, turn, barrier, sum, ok, root)) return false;
#pragma unroll 1
      for (u32 part = 0; part <= last; ++part) {
        const u64 at = course.at(part);
        if (at == kNoUnit) break;
        // The loads see the stores of `add`, because this thread has made them.
        const Packet stored = part == last ? __builtin_bit_cast(Packet, h) : load_residual(at);
        const Elements elements = __builtin_bit_cast(Elements, stored);
        store_normal(norm, course.row, course.packet_of(part) * kElements, elements, kElements, root);
      }
      sum = 0, turn ^= 1;
    }
    course.after(0);
    return true;
  }
};

#else

constexpr bool kRows = false;

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

struct Sums {};
struct Rows {
  MPICOMM_DEVICE Rows(const Finish&, Sums*, u32, u32) {}
  MPICOMM_DEVICE static Packet load_residual(u64) { return {}; }
  MPICOMM_DEVICE static void add(u64, const Reduced&, const Packet&) {}
  MPICOMM_DEVICE static bool end_step(bool ok) { return ok; }
};

#endif

}  // namespace mpicomm
