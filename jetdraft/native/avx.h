// What AVX2 and AVX-VNNI have in common: 8 columns in a register of 256 bits.
#pragma once
#include <immintrin.h>

#include "product.h"

namespace jetdraft {
namespace {

struct Avx {
  static constexpr int LANES = 8, MAX_ROWS = 8;
  using Floats = __m256;
  using Ints = __m256i;
  using Quads = __m256i;

  static __m256 floats(float number) { return _mm256_set1_ps(number); }
  static __m256 halves(const uint8_t* p) { return _mm256_cvtph_ps(load16(p)); }
  static __m256 bytes(const uint8_t* p) {
    return convert(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  static __m256 signed_bytes(const uint8_t* p) {
    return convert(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  static __m256 negative(__m256 a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static __m256 multiply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 fused(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 convert(__m256i a) { return _mm256_cvtepi32_ps(a); }
  static void store(float* y, __m256 a) { _mm256_storeu_ps(y, a); }

  template <int BITS>
  static void unpack(const uint8_t* w, Quads* quads) {
    if constexpr (BITS == 8) {
      for (int t = 0; t < QUADS; t++) quads[t] = load32(w + 64 * t);
      return;
    }
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < QUADS / 2; i++) {
      const __m256i both = load32(w + 64 * i);
      quads[2 * i] = _mm256_and_si256(both, low);
      quads[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    if constexpr (BITS == 5) {
      const __m256i plane = load32(w + 256), bit = _mm256_set1_epi8(16);
      for (int t = 0; t < QUADS; t++)
        quads[t] = _mm256_or_si256(
            quads[t], _mm256_and_si256(shifted(plane, 4 - t), bit));
    }
    if constexpr (BITS == 6)
      for (int t = 0; t < QUADS; t++) {
        const __m256i plane = load32(w + 256 + 64 * (t / 4));
        const __m256i bits = shifted(plane, 4 - 2 * (t % 4));
        quads[t] = _mm256_or_si256(
            quads[t], _mm256_and_si256(bits, _mm256_set1_epi8(48)));
      }
  }

 protected:
  static __m128i load16(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
  static __m256i load32(const uint8_t* p) {
    return _mm256_loadu_si256((const __m256i*)p);
  }
  static __m256i broadcast(const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, sizeof quad);
    return _mm256_set1_epi32(quad);
  }
  // Bits that cross into another byte are masked away by the caller.
  static __m256i shifted(__m256i a, int left) {
    return left >= 0 ? _mm256_slli_epi16(a, left) : _mm256_srli_epi16(a, -left);
  }
};

}  // namespace
}  // namespace jetdraft
