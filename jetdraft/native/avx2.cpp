// AVX2: products of bytes by VPMADDUBSW, which adds pairs in 16 bits.
#include "avx.h"
#include "cpu.h"

namespace jetdraft {
namespace {

struct Avx2 : Avx {
  static constexpr int BYTE_OFFSET = 0;

  // The sums in 16 bits hold 8 / 2^(BITS - 4) products of pairs, 15 * 127 * 2 each with
  // four bits; eight bits hold one.
  template <int BITS, int COUNT>
  static __m256i dot(const Quads* quads, const int8_t* x, int32_t start) {
    constexpr int CHAIN = BITS == 8 ? 1 : std::min(COUNT, 8 >> (BITS - 4));
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_set1_epi32(start);
    for (int from = 0; from < COUNT; from += CHAIN) {
      __m256i pairs = product<BITS>(quads[from], x + 4 * from);
      for (int t = from + 1; t < from + CHAIN; t++)
        pairs = _mm256_add_epi16(pairs, product<BITS>(quads[t], x + 4 * t));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return sum;
  }

 private:
  template <int BITS>
  static __m256i product(__m256i w, const int8_t* x) {
    const __m256i quad = broadcast(x);
    if constexpr (BITS < 8) return _mm256_maddubs_epi16(w, quad);
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(quad, w));
  }
};

}  // namespace

extern const Isa AVX2 = isa<Avx2>("avx2", has_avx2);

}  // namespace jetdraft
