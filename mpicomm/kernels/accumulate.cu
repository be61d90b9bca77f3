// Updates elements in the memory of any rank: element = MPICOMM_OP(element, contribution). Each
// update is atomic against all updates of the same element by this kernel, on any rank. That is
// MPI's rule for accumulates.
//
// The order of updates is open, as in MPI. No update publishes other data, so all accesses are
// relaxed. The synchronisation of the window orders the updates against other accesses (window.cu).
//
// GPUs have instructions for sums and bits of words of four and eight bytes. They flush subnormal
// floats of 32 bits to zero. All other updates repeat a compare-and-swap of the word in which the
// element lies, until no other access came between. So an update of a small element leaves its
// neighbours as they are, even if another thread stores to them meanwhile.

#include "atomic_updates.cuh"
#include "faults.cuh"
#include "reduce.cuh"
#include "regions.cuh"

namespace mpicomm {

// A value and its index, the elements of MINLOC and MAXLOC, with the gaps of C.
template <class Value>
struct alignas(sizeof(Value) < 8 ? 8 : 16) Located {
  Value value;
  i32 index;
};

namespace dtype {
using pair_f4 = Located<float>;
using pair_f8 = Located<double>;
using pair_i8 = Located<i64>;
using pair_i4 = Located<i32>;
using pair_i2 = Located<i16>;
}  // namespace dtype

namespace op {

// Of two pairs the pair with the smaller or larger value, and of equal values the smaller index.
template <class T>
struct minloc : Numeric<T> {
  MPICOMM_DEVICE static T next(T a, T b) {
    return b.value < a.value || (b.value == a.value && b.index < a.index) ? b : a;
  }
};
template <class T>
struct maxloc : Numeric<T> {
  MPICOMM_DEVICE static T next(T a, T b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
  }
};

// The operations of MPI that only accumulates have. They move the bits of any type of their size.
template <class T>
struct replace : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State, T x) { return Number<T>::decode(x); }
};
template <class T>
struct no_op : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State state, T) { return state; }
};

}  // namespace op
}  // namespace mpicomm

#include "element.cuh"

namespace mpicomm {

// The host's copies of this constant and these structures are in window.py; a test compares them.
constexpr u32 kAccumulateThreads = 256;

struct Accumulation {
  Packing walk;  // `memory` is the memory to update, and `packed` the contributions
  u8* result;    // gets the previous elements, in the order of the contributions; or null
};

struct Swap {
  u8* target;
  const u8* value;
  const u8* compare;
  u8* result;
  const u32* failed;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class T>
constexpr bool kIsWord = false;  // an integer of four or eight bytes
template <>
constexpr bool kIsWord<i32> = true;
template <>
constexpr bool kIsWord<u32> = true;
template <>
constexpr bool kIsWord<i64> = true;
template <>
constexpr bool kIsWord<u64> = true;

// Whether GPUs have an instruction for an operation on words.
template <class Update, class T>
constexpr bool kIsOfWords = kSame<Update, op::sum<T>> || kSame<Update, op::band<T>> || kSame<Update, op::bor<T>> ||
                            kSame<Update, op::bxor<T>>;

template <u32 nbytes>
struct WordOf {
  using Type = u32;
};
template <>
struct WordOf<8> {
  using Type = u64;
};
template <>
struct WordOf<16> {
  using Type = Pair;
};

MPICOMM_DEVICE bool is_equal(u32 a, u32 b) { return a == b; }
MPICOMM_DEVICE bool is_equal(u64 a, u64 b) { return a == b; }
MPICOMM_DEVICE bool is_equal(const Pair& a, const Pair& b) { return a.first == b.first && a.second == b.second; }

MPICOMM_DEVICE Pair load_relaxed(const Pair* p) { return load_volatile(p); }

// Returns the element that begins `shift` bits into a word.
template <class T>
MPICOMM_DEVICE T element_of(u32 word, u32 shift) {
  if constexpr (sizeof(T) == 1) return __builtin_bit_cast(T, static_cast<u8>(word >> shift));
  else return __builtin_bit_cast(T, static_cast<u16>(word >> shift));
}
template <class T>
MPICOMM_DEVICE u32 bits_of_element(T x) {
  if constexpr (sizeof(T) == 1) return __builtin_bit_cast(u8, x);
  else return __builtin_bit_cast(u16, x);
}

// Replaces an element by `update(element)`, and returns the previous element. The first load may be
// torn if the word has sixteen bytes; then the swap fails.
template <class T, class Update>
MPICOMM_DEVICE T swap_until(T* p, Update update) {
  if constexpr (sizeof(T) < 4) {
    const u64 address = reinterpret_cast<u64>(p);
    u32* const word = reinterpret_cast<u32*>(address & ~3ull);
    const u32 shift = static_cast<u32>(address & 3) * 8, mask = ((1u << 8 * sizeof(T)) - 1) << shift;
    u32 seen = load_relaxed(word);
    for (;;) {
      const T previous = element_of<T>(seen, shift);
      const u32 wanted = (seen & ~mask) | bits_of_element(update(previous)) << shift;
      const u32 before = compare_and_swap(word, seen, wanted);
      if (before == seen) return previous;
      seen = before;
    }
  } else {
    using Word = typename WordOf<sizeof(T)>::Type;
    Word* const word = reinterpret_cast<Word*>(p);
    Word seen = load_relaxed(word);
    for (;;) {
      const T previous = __builtin_bit_cast(T, seen);
      const Word before = compare_and_swap(word, seen, __builtin_bit_cast(Word, update(previous)));
      if (is_equal(before, seen)) return previous;
      seen = before;
    }
  }
}

// Returns an element that other threads may update meanwhile.
template <class T>
MPICOMM_DEVICE T load_element(T* p) {
  if constexpr (sizeof(T) == 4 || sizeof(T) == 8) {
    using Word = typename WordOf<sizeof(T)>::Type;
    return __builtin_bit_cast(T, load_relaxed(reinterpret_cast<const Word*>(p)));
  } else {  // a load of sixteen bytes may be torn
    return swap_until(p, [](T element) { return element; });
  }
}

// Combines an element with `x` by `Update`, and returns the previous element.
template <class Update, class T>
MPICOMM_DEVICE T update_element(T* p, T x) {
  if constexpr (kSame<Update, op::no_op<T>>) {
    return load_element(p);
  } else if constexpr (kSame<Update, op::sum<T>> && (kSame<T, float> || kSame<T, double>)) {
    return fetch_add(p, x);
  } else if constexpr (kIsWord<T> && kIsOfWords<Update, T>) {
    using Word = typename WordOf<sizeof(T)>::Type;
    Word* const word = reinterpret_cast<Word*>(p);
    const Word bits = static_cast<Word>(x);
    if constexpr (kSame<Update, op::sum<T>>) return static_cast<T>(fetch_add(word, bits));
    else if constexpr (kSame<Update, op::band<T>>) return static_cast<T>(fetch_and(word, bits));
    else if constexpr (kSame<Update, op::bor<T>>) return static_cast<T>(fetch_or(word, bits));
    else return static_cast<T>(fetch_xor(word, bits));
  } else {
    return swap_until(p, [=](T element) { return Update::last(Update::next(Update::first(element), x), 1); });
  }
}

// The same, without the previous element.
template <class Update, class T>
MPICOMM_DEVICE void apply_to_element(T* p, T x) {
  if constexpr (kSame<Update, op::sum<T>> && (kSame<T, float> || kSame<T, double>)) {
    add_to(p, x);
  } else if constexpr (kSame<Update, op::sum<T>> && kIsWord<T>) {
    using Word = typename WordOf<sizeof(T)>::Type;
    add_to(reinterpret_cast<Word*>(p), static_cast<Word>(x));
  } else {
    update_element<Update>(p, x);
  }
}

constexpr bool kOnlyReads = kSame<Op, op::no_op<Element>>;

MPICOMM_DEVICE void accumulate(u8* target, const u8* contribution, u8* result) {
  Element* const element = reinterpret_cast<Element*>(target);
  // The contributions of an operation that only reads do not exist.
  const Element x = kOnlyReads ? Element{} : *reinterpret_cast<const Element*>(contribution);
  if (result == nullptr) {
    apply_to_element<Op>(element, x);
  } else {
    *reinterpret_cast<Element*>(result) = update_element<Op>(element, x);
  }
}

MPICOMM_DEVICE void accumulate_all(const Accumulation& x) {
  const Packing& walk = x.walk;
  // After a failed wait the contributions may hold other data, which must not get into the memory
  // of a peer. Pairs with the store in report_fault: a wait of this stream was an earlier kernel,
  // so a plain load sees its store.
  if (*walk.failed != kClear) return;
  const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
  if (walk.num_regions == 1 && walk.first.counts[0] == 1) {
    // One run. Neighbouring threads update neighbouring elements, so a warp sends whole lines.
    const u64 count = walk.first.run_nbytes / sizeof(Element);
    u8* const memory = walk.memory + walk.first.memory;
    for (u64 i = thread; i < count; i += threads) {
      const u64 at = i * sizeof(Element);
      accumulate(memory + at, walk.packed + at, x.result == nullptr ? nullptr : x.result + at);
    }
    return;
  }
  u32 region = 0;
  for (u64 number = thread; number < walk.units; number += threads) {
    region = region_of(walk, number, region);
    const Unit unit = unit_of<true>(walk, walk.regions[region], region, number);
    for (u32 at = 0; at < unit.nbytes; at += sizeof(Element)) {
      const u64 place = static_cast<u64>(unit.from - walk.packed) + at;
      accumulate(unit.to + at, unit.from + at, x.result == nullptr ? nullptr : x.result + place);
    }
  }
}

// Replaces an element by `value` if its bits are the bits of `compare`.
template <class T>
MPICOMM_DEVICE void compare_and_swap_element(const Swap& x) {
  if constexpr (kSame<T, u8> || kSame<T, u16> || kSame<T, u32> || kSame<T, u64>) {
    if (*x.failed != kClear) return;  // as in accumulate_all
    const T value = *reinterpret_cast<const T*>(x.value), compare = *reinterpret_cast<const T*>(x.compare);
    *reinterpret_cast<T*>(x.result) =
        swap_until(reinterpret_cast<T*>(x.target), [=](T element) { return element == compare ? value : element; });
  }
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kAccumulateThreads)
    mpicomm_accumulate(const __grid_constant__ mpicomm::Accumulation);
extern "C" __global__ void __launch_bounds__(1) mpicomm_compare_and_swap(const __grid_constant__ mpicomm::Swap);

MPICOMM_KERNEL void mpicomm_accumulate(const __grid_constant__ mpicomm::Accumulation x) { mpicomm::accumulate_all(x); }

MPICOMM_KERNEL void mpicomm_compare_and_swap(const __grid_constant__ mpicomm::Swap x) {
  mpicomm::compare_and_swap_element<mpicomm::Element>(x);
}
