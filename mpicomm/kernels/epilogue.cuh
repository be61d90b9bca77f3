// The epilogue of a reduction: MPICOMM_EPILOGUE is an expression of the user
// (mpicomm/epilogues). Its v is an element of the result, i the index of the element, and w the
// operands. The value v is rounded to the stored type. So the result has the same bits in a kernel
// that reduces and in epilogue.cu, which reads the stored result.
#pragma once

#include "element.cuh"
#include "expressions.cuh"

namespace mpicomm {

// The host's copies of this constant and structure are in epilogue.py; a test compares them.
constexpr u32 kMostOperands = 8;

struct Operands {
  u64 words[kMostOperands];  // addresses of arrays, and numbers
  u64 count;                 // of all elements of the result; every index is below it

  template <class A>
  MPICOMM_DEVICE const A* array(u32 number) const {
    return reinterpret_cast<const A*>(words[number]);
  }
  MPICOMM_DEVICE double real(u32 number) const { return __builtin_bit_cast(double, words[number]); }
  MPICOMM_DEVICE i64 integer(u32 number) const { return static_cast<i64>(words[number]); }
};

#if defined(MPICOMM_RESULT)
using Finished = dtype::MPICOMM_RESULT;
#else
using Finished = Element;
#endif

MPICOMM_DEVICE Finished finish(Element reduced, [[maybe_unused]] i64 i, [[maybe_unused]] const Operands& w) {
  using State = typename Number<Element>::Value;
  [[maybe_unused]] const State v = Number<Element>::decode(reduced);
  return fn::rounded<Finished>(MPICOMM_EPILOGUE);
}

}  // namespace mpicomm
