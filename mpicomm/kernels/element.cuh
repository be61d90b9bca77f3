// Element and Op: the reduction that a kernel is compiled for, MPICOMM_OP on elements of MPICOMM_DTYPE. Without these
// macros the kernel reduces nothing, and an element is a byte.
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
