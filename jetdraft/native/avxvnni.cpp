// AVX-VNNI: VPDPBUSD on registers of 256 bits.
#include "avx.h"

namespace jetdraft {
namespace {

struct AvxVnni : Avx {
  static constexpr int BYTE_OFFSET = 128;  // the instruction reads unsigned weights

  template <int BITS, int FIRST, int COUNT, int M>
  INLINE static void dots(const uint8_t* w, const RowBlock* read, Ints* n) {
#pragma unroll
    for (int m = 0; m < M; m++) {
      const __m256i start = _mm256_set1_epi32(read[m].corrections[FIRST > 0]);
      n[m] = {start, start};
    }
#pragma unroll
    for (int t = FIRST; t < FIRST + COUNT; t++) {
      __m256i quad[2] = {unpack<BITS>(w, t, 0), unpack<BITS>(w, t, 1)};
      if constexpr (BITS == 8)
        for (__m256i& half : quad) half = _mm256_xor_si256(half, _mm256_set1_epi8(-128));
#pragma unroll
      for (int m = 0; m < M; m++) {
        const __m256i x = broadcast(read[m].q + 4 * t);
        for (int i = 0; i < 2; i++) {
          n[m].at[i] = _mm256_dpbusd_avx_epi32(n[m].at[i], quad[i], x);
          asm volatile("" : "+x"(n[m].at[i]));  // in this order, see avx2.cpp
        }
      }
    }
  }
};

}  // namespace

extern const Isa AVXVNNI = isa<AvxVnni>("avxvnni", has_avxvnni);

}  // namespace jetdraft
