// Vectors of numbers in registers, and how they are loaded.

#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace opintercept::CPU_CAPABILITY {

#if defined(__AVX512F__)
constexpr int WIDTH = 64; // bytes of a vector register
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif

template <typename T, int N>
struct VecOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int N>
using Vec = typename VecOf<T, N>::type;

template <typename To, typename From>
inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename V, typename T>
inline V load(const T* from) {
  V loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

// GCC 12 converts vectors to wider ones in two halves, at twice the time, hence the intrinsics.

template <int N>
inline Vec<double, N> doubles(Vec<float, N> from) {
#ifdef __AVX512F__
  if constexpr (N == 8) {
    return same_bits<Vec<double, N>>(_mm512_cvtps_pd(same_bits<__m256>(from)));
  }
#endif
#ifdef __AVX2__
  if constexpr (N == 4) {
    return same_bits<Vec<double, N>>(_mm256_cvtps_pd(same_bits<__m128>(from)));
  }
#endif
  return __builtin_convertvector(from, Vec<double, N>);
}

template <int N>
inline Vec<uint32_t, N> zero_extended(const int16_t* from) {
#ifdef __AVX2__
  if constexpr (N == 8) {
    return same_bits<Vec<uint32_t, N>>(_mm256_cvtepu16_epi32(load<__m128i>(from)));
  } else if constexpr (N == 4) {
    return same_bits<Vec<uint32_t, N>>(_mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
#endif
  return __builtin_convertvector(load<Vec<uint16_t, N>>(from), Vec<uint32_t, N>);
}

#ifdef __AVX2__

// N values of at most 32 bits that fill a register.
template <int N, typename T>
inline Vec<int32_t, N> sign_extended(const T* from) {
  auto loaded = load<Vec<T, N>>(from);
  if constexpr (sizeof(T) == 4) {
    return loaded;
#ifdef __AVX512F__
  } else if constexpr (sizeof(T) == 2) {
    return same_bits<Vec<int32_t, N>>(_mm512_cvtepi16_epi32(same_bits<__m256i>(loaded)));
  } else {
    return same_bits<Vec<int32_t, N>>(_mm512_cvtepi8_epi32(same_bits<__m128i>(loaded)));
#else
  } else if constexpr (sizeof(T) == 2) {
    return same_bits<Vec<int32_t, N>>(_mm256_cvtepi16_epi32(same_bits<__m128i>(loaded)));
  } else {
    return same_bits<Vec<int32_t, N>>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
  }
}

// The products in 64 bits of every second value.
template <int N>
inline Vec<uint64_t, N / 2> multiplied_evens(Vec<int32_t, N> a, Vec<int32_t, N> b) {
#ifdef __AVX512F__
  return same_bits<Vec<uint64_t, N / 2>>(_mm512_mul_epi32(same_bits<__m512i>(a), same_bits<__m512i>(b)));
#else
  return same_bits<Vec<uint64_t, N / 2>>(_mm256_mul_epi32(same_bits<__m256i>(a), same_bits<__m256i>(b)));
#endif
}

template <int N>
inline uint64_t added(Vec<uint64_t, N> values) {
  if constexpr (N == 1) {
    return values[0];
  } else {
    auto halves = same_bits<std::array<Vec<uint64_t, N / 2>, 2>>(values);
    return added<N / 2>(halves[0] + halves[1]);
  }
}

#endif

template <int N>
inline Vec<float, N> from_half(const int16_t* from) {
#ifdef __AVX2__ // and F16C, since `build.SETS` asks for both
  if constexpr (N == 8) {
    return same_bits<Vec<float, N>>(_mm256_cvtph_ps(load<__m128i>(from)));
  } else if constexpr (N == 4) {
    return same_bits<Vec<float, N>>(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
#endif
  auto bits = zero_extended<N>(from), sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
  auto normal = (rest << 13) + (112 << 23); // another bias
  normal = rest >= 0x7c00 ? normal + (112 << 23) : normal;
  auto subnormal = __builtin_convertvector(rest, Vec<float, N>) * 0x1p-24f;
  auto magnitude = rest < 0x400 ? same_bits<Vec<uint32_t, N>>(subnormal) : normal;
  return same_bits<Vec<float, N>>(magnitude | sign);
}

} // namespace opintercept::CPU_CAPABILITY
