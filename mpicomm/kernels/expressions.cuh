// The functions of expressions of the user (mpicomm/expressions), each with NumPy's meaning.
// Operands and results have the type in which a kernel computes: see Number<T>::Value.
//
//   integers     wrap. Division rounds down, and division by 0 gives 0. A shift by at least the
//                number of bits moves all bits out.
//   max, min     NaN wins; of +0 and -0 the later one
//   power<n>     n - 1 or fewer multiplications, in the order of `power` in functions.py
//   exp, log, pow, tanh    of CUDA: their last bits may differ from NumPy. All other functions have
//                          the bits of NumPy.
#pragma once

#include "reduce.cuh"

// A function of C. g++ takes longer for the header that declares it than for most kernels.
#if defined(__CUDACC__)
#define MPICOMM_C(name) ::name
#else
#define MPICOMM_C(name) __builtin_##name
#endif

namespace mpicomm {
namespace fn {

using mpicomm::add;
using mpicomm::multiply;

template <class T>
constexpr bool kIsWhole = kIsInteger<T>;
template <class F>
constexpr bool kIsWhole<Complex<F>> = false;

// Numbers of other types, and truth values, as numbers of type T.
template <class T>
struct As {
  template <class V>
  MPICOMM_DEVICE static T number(V value) {
    return static_cast<T>(value);
  }
};
template <class F>
struct As<Complex<F>> {
  template <class V>
  MPICOMM_DEVICE static Complex<F> number(V value) {
    return {static_cast<F>(value), 0};
  }
  template <class G>
  MPICOMM_DEVICE static Complex<F> number(Complex<G> value) {
    return {static_cast<F>(value.real), static_cast<F>(value.imag)};
  }
};
template <class T, class V>
MPICOMM_DEVICE T number(V value) {
  return As<T>::number(value);
}

// Rounds to odd: cuts the number off, and sets the last bit if that loses anything. So a second
// rounding, to fewer bits, sees on which side of a tie the number lies, and gives the result of one
// rounding.
MPICOMM_DEVICE float rounded_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (nearest == value) return nearest;
  const bool beyond = value > 0 ? nearest > value : nearest < value;
  return float_of((bits_of(nearest) - beyond) | 1);  // NaN stays NaN
}
MPICOMM_DEVICE float rounded_to_odd(float value) { return value; }
template <class T>
MPICOMM_DEVICE float rounded_to_odd(T value) {
  u64 magnitude = value < 0 ? 0 - static_cast<u64>(value) : static_cast<u64>(value);
  if (magnitude >> 53 != 0) magnitude = (magnitude >> 11 | ((magnitude & 0x7FF) != 0)) << 11;  // to odd, as a double
  const double exact = static_cast<double>(magnitude);
  return rounded_to_odd(value < 0 ? -exact : exact);
}

// A number as an element of type T, which has one rounding.
template <class T, class V>
MPICOMM_DEVICE T rounded(V value) {
  using Value = typename Number<T>::Value;
  if constexpr (sizeof(T) < sizeof(Value)) return Number<T>::encode(rounded_to_odd(value));
  else return Number<T>::encode(number<Value>(value));
}

// Literals. An integer becomes a float by way of a double, as in Python.
template <class T>
MPICOMM_DEVICE T literal(double value) {
  return number<T>(value);
}
template <class T>
MPICOMM_DEVICE T literal(u64 value) {
  if constexpr (kIsWhole<T>) return number<T>(value);
  else return number<T>(static_cast<double>(value));
}

// An element of an array of A, as a number of type T.
template <class T, class A>
MPICOMM_DEVICE T element(const A* array, i64 index) {
  return number<T>(Number<A>::decode(array[index]));
}

template <class T>
MPICOMM_DEVICE T negative(T x) {
  if constexpr (kIsInteger<T>) return static_cast<T>(0 - static_cast<u64>(x));
  else return -x;
}
template <class F>
MPICOMM_DEVICE Complex<F> negative(Complex<F> x) {
  return {-x.real, -x.imag};
}

template <class T>
MPICOMM_DEVICE T subtract(T x, T y) {
  if constexpr (kIsInteger<T>) return static_cast<T>(static_cast<u64>(x) - static_cast<u64>(y));
  else return x - y;
}
template <class F>
MPICOMM_DEVICE Complex<F> subtract(Complex<F> x, Complex<F> y) {
  return {x.real - y.real, x.imag - y.imag};
}

template <class T>
MPICOMM_DEVICE T divide(T x, T y) {
  return x / y;
}

template <class F>
MPICOMM_DEVICE Complex<F> conj(Complex<F> x) {
  return {x.real, -x.imag};
}

// Integers.
template <class T>
MPICOMM_DEVICE T remainder(T x, T y) {
  constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(0);
  // The quotient of the smallest number and -1 does not fit into the type, and the processor would
  // trap.
  if (y == 0 || (kSigned && y == static_cast<T>(-1))) return 0;
  const T rest = static_cast<T>(x % y);
  return rest != 0 && (rest < 0) != (y < 0) ? static_cast<T>(rest + y) : rest;
}
template <class T>
MPICOMM_DEVICE T floor_divide(T x, T y) {
  constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(0);
  if (y == 0) return 0;
  if (kSigned && y == static_cast<T>(-1)) return negative(x);
  const T quotient = static_cast<T>(x / y);
  return x % y != 0 && (x < 0) != (y < 0) ? static_cast<T>(quotient - 1) : quotient;
}
template <class T>
MPICOMM_DEVICE T bit_and(T x, T y) {
  return static_cast<T>(x & y);
}
template <class T>
MPICOMM_DEVICE T bit_or(T x, T y) {
  return static_cast<T>(x | y);
}
template <class T>
MPICOMM_DEVICE T bit_xor(T x, T y) {
  return static_cast<T>(x ^ y);
}
template <class T>
MPICOMM_DEVICE T invert(T x) {
  return static_cast<T>(~x);
}
// A negative number of bits counts as a huge number.
template <class T>
MPICOMM_DEVICE T shift_left(T x, T bits) {
  return static_cast<u64>(bits) < 8 * sizeof(T) ? static_cast<T>(static_cast<u64>(x) << bits) : static_cast<T>(0);
}
template <class T>
MPICOMM_DEVICE T shift_right(T x, T bits) {
  if (static_cast<u64>(bits) < 8 * sizeof(T)) return static_cast<T>(x >> bits);
  return x < 0 ? static_cast<T>(-1) : static_cast<T>(0);
}

// Comparisons and truth values.
template <class T>
MPICOMM_DEVICE bool less(T x, T y) {
  return x < y;
}
template <class T>
MPICOMM_DEVICE bool less_equal(T x, T y) {
  return x <= y;
}
template <class T>
MPICOMM_DEVICE bool greater(T x, T y) {
  return x > y;
}
template <class T>
MPICOMM_DEVICE bool greater_equal(T x, T y) {
  return x >= y;
}
template <class T>
MPICOMM_DEVICE bool equal(T x, T y) {
  return x == y;
}
template <class F>
MPICOMM_DEVICE bool equal(Complex<F> x, Complex<F> y) {
  return x.real == y.real && x.imag == y.imag;
}
template <class T>
MPICOMM_DEVICE bool not_equal(T x, T y) {
  return !equal(x, y);
}
MPICOMM_DEVICE bool both(bool x, bool y) { return x & y; }
MPICOMM_DEVICE bool either(bool x, bool y) { return x | y; }
MPICOMM_DEVICE bool negation(bool x) { return !x; }
template <class T>
MPICOMM_DEVICE T where(bool truth, T x, T y) {
  return truth ? x : y;
}

template <class T>
MPICOMM_DEVICE T max(T x, T y) {
  return x > y || x != x ? x : y;
}
template <class T>
MPICOMM_DEVICE T min(T x, T y) {
  return x < y || x != x ? x : y;
}

template <u32 exponent, class T>
MPICOMM_DEVICE T power(T base) {
  if constexpr (exponent == 1) {
    return base;
  } else {
    const T half = power<exponent / 2>(base), square = multiply(half, half);
    if constexpr (exponent % 2 == 1) return multiply(square, base);
    else return square;
  }
}

// Floats. The names with f are names of C, which NVRTC knows without a header.
MPICOMM_DEVICE float abs(float x) { return MPICOMM_C(fabsf)(x); }
MPICOMM_DEVICE double abs(double x) { return MPICOMM_C(fabs)(x); }
template <class T>
MPICOMM_DEVICE T abs(T x) {
  return x < 0 ? negative(x) : x;
}

#define MPICOMM_FUNCTION(name)                                          \
  MPICOMM_DEVICE float name(float x) { return MPICOMM_C(name##f)(x); } \
  MPICOMM_DEVICE double name(double x) { return MPICOMM_C(name)(x); }
MPICOMM_FUNCTION(ceil)
MPICOMM_FUNCTION(exp)
MPICOMM_FUNCTION(floor)
MPICOMM_FUNCTION(log)
MPICOMM_FUNCTION(sqrt)
MPICOMM_FUNCTION(tanh)
#undef MPICOMM_FUNCTION
MPICOMM_DEVICE float pow(float x, float y) { return MPICOMM_C(powf)(x, y); }
MPICOMM_DEVICE double pow(double x, double y) { return MPICOMM_C(pow)(x, y); }
#undef MPICOMM_C

}  // namespace fn
}  // namespace mpicomm
