// NEON with products of matrices (Armv8.6, the cores of Thor): SMMLA multiplies 2 rows
// with 2 columns, 8 numbers at a time.
#include "neon.h"

namespace jetdraft {
namespace {

struct I8mm : Neon {
  static constexpr bool IN_PAIRS = true;

  // Of each two quads: 8 numbers of the columns 0 and 1, then of 2 and 3.
  template <int BITS>
  static void unpack(const uint8_t* w, Quads* pairs) {
    Quads quads[QUADS];
    Neon::unpack<BITS>(w, quads);
    for (int t = 0; t < QUADS; t += 2) {
      const auto even = vreinterpretq_s32_s8(quads[t]);
      const auto odd = vreinterpretq_s32_s8(quads[t + 1]);
      pairs[t] = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
      pairs[t + 1] = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
    }
  }
  template <int BITS, int COUNT>
  static void dot_pair(const Quads* pairs, const int8_t* x, const int8_t* next,
                       int32_t start, int32_t next_start, int32x4_t* sums) {
    const int32x4_t from = {start, start, next_start, next_start};
    int32x4_t low = from, high = from;
    for (int t = 0; t < COUNT; t += 2) {
      const int8x16_t rows = vcombine_s8(vld1_s8(x + 4 * t), vld1_s8(next + 4 * t));
      low = vmmlaq_s32(low, rows, pairs[t]);
      high = vmmlaq_s32(high, rows, pairs[t + 1]);
    }
    sums[0] = vcombine_s32(vget_low_s32(low), vget_low_s32(high));
    sums[1] = vcombine_s32(vget_high_s32(low), vget_high_s32(high));
  }
};

}  // namespace

extern const Isa I8MM = isa<I8mm>("i8mm", [] {
  constexpr unsigned long BIT = 1ul << 13;
  return (getauxval(AT_HWCAP2) & BIT) != 0;
});

}  // namespace jetdraft
