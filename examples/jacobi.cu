// A time step of jacobi.py. Each block computes some rows of the plate's tile.
//
// relax       only computes: the program moves the edges between ranks
// relax_all   also stores the edges in the memory of the neighbours, so that the host has nothing to
// do between steps

#include <mpicomm.cuh>

using mpicomm::u32;
using mpicomm::u64;

// A plane is a tile of rows x columns cells, and the cells of other ranks around it. A rank has two
// planes, because each step reads one and writes the other.
struct Plane {
  double* cells;
  u32 columns;

  MPICOMM_DEVICE double& at(u32 row, u32 column) const { return cells[static_cast<u64>(row) * (columns + 2) + column]; }
  // The heat one step later. NumPy adds in the same order, and -fmad=false keeps each rounding.
  MPICOMM_DEVICE double later(u32 row, u32 column) const {
    const double around = at(row - 1, column) + at(row + 1, column) + at(row, column - 1) + at(row, column + 1);
    return (around * 0.25 + at(row, column)) * 0.5;
  }
};

// The rows of this block, counted from 1: row 0 belongs to the rank above.
MPICOMM_DEVICE u32 first_row(u32 rows, u32 block) {
  return 1 + static_cast<u32>(static_cast<u64>(rows) * block / gridDim.x);
}

MPICOMM_KERNEL void relax(double* old_cells, double* new_cells, u32 rows, u32 columns) {
  const Plane before{old_cells, columns}, after{new_cells, columns};
  for (u32 row = first_row(rows, blockIdx.x); row < first_row(rows, blockIdx.x + 1); ++row) {
    for (u32 column = 1 + threadIdx.x; column <= columns; column += blockDim.x) {
      after.at(row, column) = before.later(row, column);
    }
  }
}

enum Side : u32 { kAbove, kBelow, kLeft, kRight };

// `planes` and `flags` are the pointers of two symmetric arrays: the two planes, and a uint64 for
// each side and block. `neighbours` are the ranks on the four sides, negative at the ends of the
// plate.
// `steps` counts the steps of each block on this rank. `failed` becomes 1 if a rank does not come
// within `timeout_ns`.
//
// A block waits only for blocks of earlier launches, so not all blocks of a launch need to run at
// once.
MPICOMM_KERNEL void relax_all(const u64* planes, const u64* flags, u32 rank, const int* neighbours, u64* steps,
                              u32 rows, u32 columns, u64 timeout_ns, u32* failed) {
  const mpicomm::Block block;
  const u32 number = blockIdx.x, last = gridDim.x - 1;
  const u64 step = steps[number] + 1, tile = static_cast<u64>(rows + 2) * (columns + 2);
  const auto flag_of = [&](u32 owner, u32 side, u32 owners_block) {
    return mpicomm::part<u64>(flags, owner) + side * gridDim.x + owners_block;
  };
  // Whether another rank has the cells next to this block on a side.
  const auto is_edge = [&](u32 side) {
    return neighbours[side] >= 0 && (side != kAbove || number == 0) && (side != kBelow || number == last);
  };

  // The flags say that the edges of the step before have come. They also say that the neighbours'
  // blocks have read the edges of two steps ago, which this block overwrites in this step.
  bool come = *failed == 0;
  for (u32 side = kAbove; side <= kRight; ++side) {
    if (is_edge(side)) come = mpicomm::wait(block, flag_of(rank, side, number), step - 1, timeout_ns) && come;
  }
  if (!block.all(come)) {
    if (threadIdx.x == 0) *failed = 1;
    return;
  }

  const auto plane_of = [&](u32 owner, u64 of_step) {
    return Plane{mpicomm::part<double>(planes, owner) + of_step % 2 * tile, columns};
  };
  const Plane before = plane_of(rank, step - 1), after = plane_of(rank, step);
  const u32 begin = first_row(rows, number), end = first_row(rows, number + 1);
  for (u32 row = begin; row < end; ++row) {
    for (u32 column = 1 + threadIdx.x; column <= columns; column += blockDim.x) {
      const double heat = before.later(row, column);
      after.at(row, column) = heat;
      if (column == 1 && is_edge(kLeft)) plane_of(neighbours[kLeft], step).at(row, columns + 1) = heat;
      if (column == columns && is_edge(kRight)) plane_of(neighbours[kRight], step).at(row, 0) = heat;
    }
  }
  const u64 nbytes = columns * sizeof(double);
  const auto put_row = [&](u32 side, u32 row, u32 halo) {
    if (is_edge(side)) mpicomm::put(block, &plane_of(neighbours[side], step).at(halo, 1), &after.at(row, 1), nbytes);
  };
  put_row(kAbove, 1, rows + 1);
  put_row(kBelow, rows, 0);

  // Each flag tells one block of a neighbour that its edge is there, and that this block has read
  // the neighbour's last edge.
  if (is_edge(kAbove)) mpicomm::signal(block, flag_of(neighbours[kAbove], kBelow, last), step);
  if (is_edge(kBelow)) mpicomm::signal(block, flag_of(neighbours[kBelow], kAbove, 0), step);
  if (is_edge(kLeft)) mpicomm::signal(block, flag_of(neighbours[kLeft], kRight, number), step);
  if (is_edge(kRight)) mpicomm::signal(block, flag_of(neighbours[kRight], kLeft, number), step);
  if (threadIdx.x == 0) steps[number] = step;
}
