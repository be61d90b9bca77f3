// Element and Op: the reduction of a compiled kernel, MPICOMM_OP on elements of MPICOMM_DTYPE.
// Without these macros the kernel reduces nothing, and an element is a byte. The operation `custom` is
// MPICOMM_EXPRESSION, which the host writes (mpicomm/expressions): a is the reduction of the
// previous ranks, and b is the contribution of the next rank.
#pragma once

#if defined(MPICOMM_DTYPE)

#include "reduce.cuh"

#if defined(MPICOMM_EXPRESSION)
#include "expressions.cuh"

namespace mpicomm {
namespace op {
template <class T>
struct custom : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State a, T x) {
    [[maybe_unused]] const State b = Number<T>::decode(x);
    return MPICOMM_EXPRESSION;
  }
};
}  // namespace op
}  // namespace mpicomm
#endif

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
