// AVX-512 VNNI: VPDPBUSD on registers of 512 bits, which hold a quad of all 16 columns.
#include <immintrin.h>

#include "product.h"

namespace jetdraft {
namespace {

struct Avx512 {
  static constexpr int LANES = 16, MAX_ROWS = 8;
  static constexpr int BYTE_OFFSET = 128;  // the instruction reads unsigned weights
  using Floats = __m512;
  using Ints = __m512i;

  static __m512 floats(float number) { return _mm512_set1_ps(number); }
  static __m512 halves(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
  }
  static __m512 bytes(const uint8_t* p) {
    return convert(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  static __m512 signed_bytes(const uint8_t* p) {
    return convert(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  static __m512 negative(__m512 a) {
    const __m512i sign = _mm512_set1_epi32(1 << 31);
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), sign));
  }
  static __m512 multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 fused(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 convert(__m512i a) { return _mm512_cvtepi32_ps(a); }
  static void store(float* y, __m512 a) { _mm512_storeu_ps(y, a); }

  template <int BITS, int FIRST, int COUNT, int M>
  INLINE static void dots(const uint8_t* w, const RowBlock* read, Ints* n) {
#pragma unroll
    for (int m = 0; m < M; m++) n[m] = _mm512_set1_epi32(read[m].corrections[FIRST > 0]);
#pragma unroll
    for (int t = FIRST; t < FIRST + COUNT; t++) {
      const __m512i quad = unpack<BITS>(w, t);
#pragma unroll
      for (int m = 0; m < M; m++) {
        int32_t x;
        std::memcpy(&x, read[m].q + 4 * t, sizeof x);
        n[m] = _mm512_dpbusd_epi32(n[m], quad, _mm512_set1_epi32(x));
      }
    }
  }

 private:
  // Quad t of 16 columns of the block at w, an unsigned byte for each number.
  template <int BITS>
  static __m512i unpack(const uint8_t* w, int t) {
    if constexpr (BITS == 8)
      return _mm512_xor_si512(load(w + 64 * t), _mm512_set1_epi8(-128));
    if constexpr (BITS == 3) {
      const __m512i plane = load(w + 64 * (t / 4));
      const __m512i low = high_bits(__m512i{}, plane, -2 * (t / 2 % 2), 0x33);
      const __m512i pair = high_bits(low, load(w + 128), 2 - t / 2, 0x44);
      return high_bits(__m512i{}, pair, -4 * (t % 2), 7);
    }
    const __m512i both = load(w + 64 * (t / 2));
    __m512i quad = t % 2 ? _mm512_srli_epi16(both, 4) : both;
    quad = _mm512_and_si512(quad, _mm512_set1_epi8(15));
    if constexpr (BITS == 5) quad = high_bits(quad, load(w + 256), 4 - t, 16);
    if constexpr (BITS == 6)
      quad = high_bits(quad, load(w + 256 + 64 * (t / 4)), 4 - 2 * (t % 4), 48);
    return quad;
  }
  static __m512i load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  // Bits that cross into another byte are masked away.
  static __m512i high_bits(__m512i quad, __m512i plane, int left, char mask) {
    const __m512i bits = left >= 0 ? _mm512_slli_epi16(plane, left)
                                   : _mm512_srli_epi16(plane, -left);
    return _mm512_or_si512(quad, _mm512_and_si512(bits, _mm512_set1_epi8(mask)));
  }
};

}  // namespace

extern const Isa AVX512VNNI = isa<Avx512>("avx512vnni", has_avx512vnni);

}  // namespace jetdraft
