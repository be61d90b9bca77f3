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
constexpr bool kMakesOneNan<op::prod<T>> = kInFloat32<typename op::prod<T>::State>;

}  // namespace mpicomm
