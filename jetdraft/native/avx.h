// What AVX2 and AVX-VNNI have in common: 16 columns in two registers.
#pragma once
#include <immintrin.h>

#include "product.h"

namespace jetdraft {
namespace {

struct Avx {
  static constexpr int LANES = 16, MAX_ROWS = 4;
  struct Floats { __m256 at[2]; };
  struct Ints { __m256i at[2]; };

  static Floats floats(float number) {
    return {_mm256_set1_ps(number), _mm256_set1_ps(number)};
  }
  static Floats halves(const uint8_t* p) {
    return {_mm256_cvtph_ps(load16(p)), _mm256_cvtph_ps(load16(p + 16))};
  }
  static Floats bytes(const uint8_t* p) {
    return convert({_mm256_cvtepu8_epi32(load8(p)), _mm256_cvtepu8_epi32(load8(p + 8))});
  }
  static Floats signed_bytes(const uint8_t* p) {
    return convert({_mm256_cvtepi8_epi32(load8(p)), _mm256_cvtepi8_epi32(load8(p + 8))});
  }
  static Floats negative(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.at[0], sign), _mm256_xor_ps(a.at[1], sign)};
  }
  static Floats multiply(Floats a, Floats b) {
    return {_mm256_mul_ps(a.at[0], b.at[0]), _mm256_mul_ps(a.at[1], b.at[1])};
  }
  static Floats fused(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.at[0], b.at[0], c.at[0]),
            _mm256_fmadd_ps(a.at[1], b.at[1], c.at[1])};
  }
  static Floats convert(Ints a) {
    return {_mm256_cvtepi32_ps(a.at[0]), _mm256_cvtepi32_ps(a.at[1])};
  }
  static void store(float* y, Floats a) {
    _mm256_storeu_ps(y, a.at[0]);
    _mm256_storeu_ps(y + 8, a.at[1]);
  }

 protected:
  // Half i of the columns of quad t of the block at w, a byte for each number.
  template <int BITS>
  static __m256i unpack(const uint8_t* w, int t, int i) {
    w += 32 * i;
    if constexpr (BITS == 8) return load32(w + 64 * t);
    if constexpr (BITS == 3) {
      const __m256i plane = load32(w + 64 * (t / 4));
      const __m256i low = high_bits(__m256i{}, plane, -2 * (t / 2 % 2), 0x33);
      const __m256i pair = high_bits(low, load32(w + 128), 2 - t / 2, 0x44);
      return high_bits(__m256i{}, pair, -4 * (t % 2), 7);
    }
    const __m256i both = load32(w + 64 * (t / 2));
    __m256i quad = t % 2 ? _mm256_srli_epi16(both, 4) : both;
    quad = _mm256_and_si256(quad, _mm256_set1_epi8(15));
    if constexpr (BITS == 5) quad = high_bits(quad, load32(w + 256), 4 - t, 16);
    if constexpr (BITS == 6)
      quad = high_bits(quad, load32(w + 256 + 64 * (t / 4)), 4 - 2 * (t % 4), 48);
    return quad;
  }
  static __m128i load8(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }
  static __m128i load16(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
  static __m256i load32(const uint8_t* p) {
    return _mm256_loadu_si256((const __m256i*)p);
  }
  static __m256i broadcast(const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, sizeof quad);
    return _mm256_set1_epi32(quad);
  }
  // Bits that cross into another byte are masked away.
  static __m256i high_bits(__m256i quad, __m256i plane, int left, char mask) {
    const __m256i bits = left >= 0 ? _mm256_slli_epi16(plane, left)
                                   : _mm256_srli_epi16(plane, -left);
    return _mm256_or_si256(quad, _mm256_and_si256(bits, _mm256_set1_epi8(mask)));
  }
};

}  // namespace
}  // namespace jetdraft
