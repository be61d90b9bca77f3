// The end of a reduction in packets.cu: the work on a unit between its reduction and the store of
// the result.
//
// An elementwise epilogue (epilogue.cuh) may keep the type of the reduction. A rank then applies it
// before it sends a unit on to other ranks, so that only one rank reads each operand. Or an
// epilogue converts (MPICOMM_RESULT). Then each rank applies it to all units that it stores,
// because packets carry elements of one size. rows.cuh normalises rows.
#pragma once

#include "units.cuh"
#if defined(MPICOMM_EPILOGUE)
#include "epilogue.cuh"
#include "reduce_packets.cuh"
#include "runs.cuh"
#elif defined(MPICOMM_WEIGHT)
#include "norm.cuh"
#endif

namespace mpicomm {

#if defined(MPICOMM_EPILOGUE)

#if defined(MPICOMM_RESULT)
constexpr bool kConverts = true;
#else
constexpr bool kConverts = false;
#endif

// The host's copy is in epilogue.py; a test compares them.
struct Finish {
  Operands operands;
  const u8* reduced;  // where the whole result would lie before the epilogue; an address there gives an index
  u8* finished;       // where the result after the epilogue goes

  using Made = Run<Finished, kUnitNbytes / sizeof(Element)>;

  MPICOMM_DEVICE u64 index_of(const u8* place) const { return static_cast<u64>(place - reduced) / sizeof(Element); }

  // Applies the epilogue to the unit of `place`.
  MPICOMM_DEVICE Made apply(const Packet& unit, const u8* place) const {
    const Elements elements = __builtin_bit_cast(Elements, unit);
    const u64 first = index_of(place);
    Made made{};
#pragma unroll
    for (u32 e = 0; e < kUnitNbytes / sizeof(Element); ++e) {
      if (first + e < operands.count) made.of[e] = finish(elements.of[e], static_cast<i64>(first + e), operands);
    }
    return made;
  }

  // Returns the unit of `place` as this rank sends it on to other ranks.
  MPICOMM_DEVICE Packet sent_on(const Packet& unit, const u8* place) const {
#if defined(MPICOMM_RESULT)
    return unit;
#else
    const Made made = apply(unit, place);
    Elements elements{};
#pragma unroll
    for (u32 e = 0; e < kUnitNbytes / sizeof(Element); ++e) elements.of[e] = made.of[e];
    return __builtin_bit_cast(Packet, elements);
#endif
  }

  // Stores the unit at offset `at` of an array of `nbytes`, as this rank has sent it on.
  MPICOMM_DEVICE void store(u8* array, u64 at, u64 nbytes, const Packet& unit) const {
    if constexpr (kConverts) {
      u8* const to = finished + index_of(array + at) * sizeof(Finished);
      store_run(to, apply(unit, array + at), (nbytes - at) / sizeof(Element));
    } else {
      store_unit(array, width_of(array), at, nbytes, unit);
    }
  }
};

#else

constexpr bool kConverts = false;

struct Finish {
#if defined(MPICOMM_WEIGHT)
  Norm norm;
#endif

  MPICOMM_DEVICE Unit sent_on(const Reduced& result, const u8*) const {
#if defined(MPICOMM_WIRE)
    return unit_from(result);
#else
    return result;
#endif
  }
  template <class Any>
  MPICOMM_DEVICE void store(u8* array, u64 at, u64 nbytes, const Any& unit) const {
    store_at(array, at, nbytes, unit);
  }
};

#endif

}  // namespace mpicomm
