// The reduction of one element: `first` takes the first contribution, `next` takes each further
// contribution in rank order, and `last` returns the result. Compile with -fmad=false
// (-ffp-contract=off elsewhere), so that a sum has the bits of NumPy's sum.
//
//   float16, bfloat16, float8   computed in float32, and `last` rounds once
//   integers                    wrap
//   max, min                    NumPy's maximum and minimum: NaN wins; of +0 and -0 the later one
//   land, lor, lxor             0 or 1 in the same type; NaN is true, as in C and NumPy
//   complex prod                (ac - bd) + (ad + bc)i, each of the four products rounded
//   avg                         the sum divided by the number of contributions; NumPy's division of
//                               complex sums
//   tree                        the sum of a binary tree: contributions 0 and 1, 2 and 3, ...; then
//                               pairs of these sums, and so on
#pragma once

#include "numbers.cuh"

namespace mpicomm {

template <class T>
constexpr bool kIsInteger = static_cast<T>(1) / 2 == 0;

template <class T>
MPICOMM_DEVICE T add(T a, T b) {
  // Unsigned, because signed overflow is undefined in C++. The low bits are the same.
  if constexpr (kIsInteger<T>) return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b));
  else return a + b;
}
template <class F>
MPICOMM_DEVICE Complex<F> add(Complex<F> a, Complex<F> b) {
  return {a.real + b.real, a.imag + b.imag};
}

template <class T>
MPICOMM_DEVICE T multiply(T a, T b) {
  if constexpr (kIsInteger<T>) return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
  else return a * b;
}
template <class F>
MPICOMM_DEVICE Complex<F> multiply(Complex<F> a, Complex<F> b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

template <class T>
MPICOMM_DEVICE T divide(T a, u32 count) {
  return a / static_cast<T>(count);
}
template <class F>
MPICOMM_DEVICE Complex<F> divide(Complex<F> a, u32 count) {
  // Smith's method, for a divisor whose imaginary part is zero.
  const F scale = 1 / static_cast<F>(count), ratio = 0;
  return {(a.real + a.imag * ratio) * scale, (a.imag - a.real * ratio) * scale};
}

template <class T>
MPICOMM_DEVICE bool is_true(T x) {
  return x != 0;
}
template <class F>
MPICOMM_DEVICE bool is_true(Complex<F> x) {
  return x.real != 0 || x.imag != 0;
}

template <class T>
MPICOMM_DEVICE void set_truth(T& x, bool truth) {
  x = static_cast<T>(truth ? 1 : 0);
}
template <class F>
MPICOMM_DEVICE void set_truth(Complex<F>& x, bool truth) {
  x = {static_cast<F>(truth ? 1 : 0), 0};
}

#if !defined(MPICOMM_TREE_LEVELS)
#define MPICOMM_TREE_LEVELS 3  // for 8 contributions
#endif
constexpr u32 kTreeLevels = MPICOMM_TREE_LEVELS;

namespace op {

// `first` and `last` of the operations on numbers.
template <class T>
struct Numeric {
  using State = typename Number<T>::Value;
  MPICOMM_DEVICE static State first(T x) { return Number<T>::decode(x); }
  MPICOMM_DEVICE static T last(State state, u32) { return Number<T>::encode(state); }
};

template <class T>
struct sum : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State state, T x) { return add(state, Number<T>::decode(x)); }
};

template <class T>
struct avg : sum<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static T last(State state, u32 count) { return Number<T>::encode(divide(state, count)); }
};

// A binary counter: while `before` contributions have come, level i has the sum of 2^i of them if bit i
// of `before` is set. A level that is full joins the next contribution, as a carry does.
template <class T>
struct tree {
  using Value = typename Number<T>::Value;
  struct State {
    Value level[kTreeLevels + 1];
  };
  MPICOMM_DEVICE static State first(T x) { return {{Number<T>::decode(x)}}; }
  MPICOMM_DEVICE static State next(State state, T x, u32 before) {
    Value sum = Number<T>::decode(x);
#pragma unroll
    for (u32 i = 0; i <= kTreeLevels; ++i) {
      if ((before >> i & 1) == 0) {
        state.level[i] = sum;
        break;
      }
      sum = add(state.level[i], sum);
    }
    return state;
  }
  MPICOMM_DEVICE static Value value(const State& state, u32 count) {
    Value sum{};
    bool begun = false;
#pragma unroll
    for (u32 i = 0; i <= kTreeLevels; ++i) {
      if ((count >> i & 1) == 0) continue;
      sum = begun ? add(state.level[i], sum) : state.level[i];
      begun = true;
    }
    return sum;
  }
  MPICOMM_DEVICE static T last(const State& state, u32 count) { return Number<T>::encode(value(state, count)); }
};

template <class T>
struct prod : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State state, T x) { return multiply(state, Number<T>::decode(x)); }
};

template <class T>
struct max : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State state, T x) {
    const State other = Number<T>::decode(x);
    return state > other || state != state ? state : other;
  }
};

template <class T>
struct min : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State state, T x) {
    const State other = Number<T>::decode(x);
    return state < other || state != state ? state : other;
  }
};

template <class T>
struct band : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State state, T x) { return static_cast<State>(state & Number<T>::decode(x)); }
};

template <class T>
struct bor : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State state, T x) { return static_cast<State>(state | Number<T>::decode(x)); }
};

template <class T>
struct bxor : Numeric<T> {
  using State = typename Numeric<T>::State;
  MPICOMM_DEVICE static State next(State state, T x) { return static_cast<State>(state ^ Number<T>::decode(x)); }
};

// `first` and `last` of the operations on truth values.
template <class T>
struct Logical {
  using State = bool;
  MPICOMM_DEVICE static bool first(T x) { return is_true(Number<T>::decode(x)); }
  MPICOMM_DEVICE static T last(bool state, u32) {
    typename Number<T>::Value truth;
    set_truth(truth, state);
    return Number<T>::encode(truth);
  }
};

template <class T>
struct land : Logical<T> {
  MPICOMM_DEVICE static bool next(bool state, T x) { return state & is_true(Number<T>::decode(x)); }
};

template <class T>
struct lor : Logical<T> {
  MPICOMM_DEVICE static bool next(bool state, T x) { return state | is_true(Number<T>::decode(x)); }
};

template <class T>
struct lxor : Logical<T> {
  MPICOMM_DEVICE static bool next(bool state, T x) { return state != is_true(Number<T>::decode(x)); }
};

}  // namespace op

// kMakesOneNan: whether all NaNs that a reduction computes have the same bits, whichever NaN is its
// input. On NVIDIA GPUs this holds for arithmetic in float32. Arithmetic in float64 keeps the bits
// of an input NaN. So do max and min, because they compare and compute nothing.
template <class T>
constexpr bool kInFloat32 = false;
template <>
constexpr bool kInFloat32<float> = true;
template <>
constexpr bool kInFloat32<Complex<float>> = true;

template <class Op>
constexpr bool kMakesOneNan = false;
template <class T>
constexpr bool kMakesOneNan<op::sum<T>> = kInFloat32<typename op::sum<T>::State>;
template <class T>
constexpr bool kMakesOneNan<op::avg<T>> = kInFloat32<typename op::avg<T>::State>;
template <class T>
constexpr bool kMakesOneNan<op::tree<T>> = kInFloat32<typename op::tree<T>::Value>;
template <class T>
constexpr bool kMakesOneNan<op::prod<T>> = kInFloat32<typename op::prod<T>::State>;

// Whether the place of a contribution counts, so that none may be missing.
template <class Op>
constexpr bool kNeedsAll = false;
template <class T>
constexpr bool kNeedsAll<op::tree<T>> = true;

// Returns the state after one more contribution than `before`.
template <class Op, class T>
MPICOMM_DEVICE typename Op::State next_of(const typename Op::State& state, T x, u32 before) {
  if constexpr (kNeedsAll<Op>) return Op::next(state, x, before);
  else return Op::next(state, x);
}

// Returns what `count` contributions make, before `last` rounds it.
template <class Op>
MPICOMM_DEVICE auto value_of(const typename Op::State& state, u32 count) {
  if constexpr (kNeedsAll<Op>) return Op::value(state, count);
  else return state;
}

}  // namespace mpicomm
