// AVX2: products of bytes by VPMADDUBSW, which adds pairs in 16 bits.
#include "avx.h"

namespace jetdraft {
namespace {

struct Avx2 : Avx {
  static constexpr int BYTE_OFFSET = 0;

  // The sums in 16 bits hold 8 / 2^(BITS - 4) products of pairs, 15 * 127 * 2 each with
  // four bits; three bits hold 8, eight bits one.
  template <int BITS, int FIRST, int COUNT, int M>
  INLINE static void dots(const uint8_t* w, const RowBlock* read, Ints* n) {
    constexpr int CHAIN = BITS == 8 ? 1 : std::min(COUNT, 8 >> std::max(BITS - 4, 0));
    const __m256i ones = _mm256_set1_epi16(1);
#pragma unroll
    for (int m = 0; m < M; m++) {
      const __m256i start = _mm256_set1_epi32(read[m].corrections[FIRST > 0]);
      n[m] = {start, start};
    }
#pragma unroll
    for (int from = FIRST; from < FIRST + COUNT; from += CHAIN) {
      Ints pairs[M];
#pragma unroll
      for (int t = from; t < from + CHAIN; t++) {
        const __m256i quad[2] = {unpack<BITS>(w, t, 0), unpack<BITS>(w, t, 1)};
#pragma unroll
        for (int m = 0; m < M; m++) {
          const __m256i x = broadcast(read[m].q + 4 * t);
          for (int i = 0; i < 2; i++) {
            const __m256i sums = product<BITS>(quad[i], x);
            __m256i& all = pairs[m].at[i];
            all = t == from ? sums : _mm256_add_epi16(all, sums);
            // In this order, or the compiler unpacks all quads first and spills them.
            asm volatile("" : "+x"(all));
          }
        }
      }
#pragma unroll
      for (int m = 0; m < M; m++)
        for (int i = 0; i < 2; i++)
          n[m].at[i] =
              _mm256_add_epi32(n[m].at[i], _mm256_madd_epi16(pairs[m].at[i], ones));
    }
  }

 private:
  template <int BITS>
  static __m256i product(__m256i w, __m256i x) {
    if constexpr (BITS < 8) return _mm256_maddubs_epi16(w, x);
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  }
};

}  // namespace

extern const Isa AVX2 = isa<Avx2>("avx2", has_avx2);

}  // namespace jetdraft
