// NEON with products of matrices (Armv8.6, the cores of Thor): SMMLA multiplies 2 rows
// with 2 columns, 8 numbers at a time.
#include "neon.h"

namespace jetdraft {
namespace {

struct I8mm : Neon {
  template <int BITS, int FIRST, int COUNT, int M>
  INLINE static void dots(const uint8_t* w, const RowBlock* read, Ints* n) {
    constexpr int PAIRS = (M + 1) / 2;  // of rows; a last row alone stands twice
    int32x4_t low[PAIRS], high[PAIRS];  // columns 0 and 1, columns 2 and 3
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int32_t one = read[2 * i].corrections[FIRST > 0],
                    two = read[second<M>(i)].corrections[FIRST > 0];
      low[i] = high[i] = {one, one, two, two};
    }
#pragma unroll
    for (int t = FIRST; t < FIRST + COUNT; t += 2) {
      const auto even = vreinterpretq_s32_s8(unpack<BITS>(w, t));
      const auto odd = vreinterpretq_s32_s8(unpack<BITS>(w, t + 1));
      const auto first = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
      const auto last = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        const int8x16_t rows = vcombine_s8(vld1_s8(read[2 * i].q + 4 * t),
                                           vld1_s8(read[second<M>(i)].q + 4 * t));
        low[i] = vmmlaq_s32(low[i], rows, first);
        high[i] = vmmlaq_s32(high[i], rows, last);
      }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      n[2 * i] = vcombine_s32(vget_low_s32(low[i]), vget_low_s32(high[i]));
      n[second<M>(i)] = vcombine_s32(vget_high_s32(low[i]), vget_high_s32(high[i]));
    }
  }

 private:
  template <int M>
  static constexpr int second(int pair) { return std::min(2 * pair + 1, M - 1); }
};

}  // namespace

extern const Isa I8MM = isa<I8mm>("i8mm", has_i8mm);

}  // namespace jetdraft
