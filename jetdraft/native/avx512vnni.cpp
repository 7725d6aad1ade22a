// AVX-512 VNNI: VPDPBUSD on registers of 512 bits, which hold a quad of all 16 columns.
#include <immintrin.h>

#include "cpu.h"
#include "product.h"

namespace jetdraft {
namespace {

struct Avx512 {
  static constexpr int LANES = 16, MAX_ROWS = 8;
  static constexpr int BYTE_OFFSET = 128;  // the instruction reads unsigned weights
  using Floats = __m512;
  using Ints = __m512i;
  using Quads = __m512i;

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

  template <int BITS>
  static void unpack(const uint8_t* w, Quads* quads) {
    if constexpr (BITS == 8) {
      for (int t = 0; t < QUADS; t++)
        quads[t] = _mm512_xor_si512(load(w + 64 * t), _mm512_set1_epi8(-128));
      return;
    }
    const __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < QUADS / 2; i++) {
      const __m512i both = load(w + 64 * i);
      quads[2 * i] = _mm512_and_si512(both, low);
      quads[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
    if constexpr (BITS == 5) {
      const __m512i plane = load(w + 256), bit = _mm512_set1_epi8(16);
      for (int t = 0; t < QUADS; t++)
        quads[t] = _mm512_or_si512(
            quads[t], _mm512_and_si512(shifted(plane, 4 - t), bit));
    }
    if constexpr (BITS == 6)
      for (int t = 0; t < QUADS; t++) {
        const __m512i bits = shifted(load(w + 256 + 64 * (t / 4)), 4 - 2 * (t % 4));
        quads[t] = _mm512_or_si512(
            quads[t], _mm512_and_si512(bits, _mm512_set1_epi8(48)));
      }
  }
  template <int BITS, int COUNT>
  static __m512i dot(const Quads* quads, const int8_t* x, int32_t start) {
    __m512i sum = _mm512_set1_epi32(start);
    for (int t = 0; t < COUNT; t++) {
      int32_t quad;
      std::memcpy(&quad, x + 4 * t, sizeof quad);
      sum = _mm512_dpbusd_epi32(sum, quads[t], _mm512_set1_epi32(quad));
    }
    return sum;
  }

 private:
  static __m512i load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static __m512i shifted(__m512i a, int left) {
    return left >= 0 ? _mm512_slli_epi16(a, left) : _mm512_srli_epi16(a, -left);
  }
};

}  // namespace

extern const Isa AVX512VNNI = isa<Avx512>("avx512vnni", has_avx512vnni);

}  // namespace jetdraft
