// AVX-VNNI: VPDPBUSD on registers of 256 bits.
#include "avx.h"
#include "cpu.h"

namespace jetdraft {
namespace {

struct AvxVnni : Avx {
  static constexpr int BYTE_OFFSET = 128;  // the instruction reads unsigned weights

  template <int BITS, int COUNT>
  static __m256i dot(const Quads* quads, const int8_t* x, int32_t start) {
    __m256i sum = _mm256_set1_epi32(start);
    for (int t = 0; t < COUNT; t++) {
      __m256i w = quads[t];
      if constexpr (BITS == 8) w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
      sum = _mm256_dpbusd_avx_epi32(sum, w, broadcast(x + 4 * t));
    }
    return sum;
  }
};

}  // namespace

extern const Isa AVXVNNI = isa<AvxVnni>("avxvnni", has_avxvnni);

}  // namespace jetdraft
