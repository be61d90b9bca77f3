// What a kernel is compiled to reduce: MPICOMM_DTYPE by MPICOMM_OP, or nothing.
#pragma once

#if defined(MPICOMM_DTYPE)

#include "reduce.cuh"

namespace mpicomm {
using Element = dtype::MPICOMM_DTYPE;
using Op = op::MPICOMM_OP<Element>;
}  // namespace mpicomm

#else

#include "memory_order.cuh"

namespace mpicomm {
using Element = u8;
}  // namespace mpicomm

#endif
