// NEON with dot products (Armv8.2, the cores of Orin): SDOT on 4 columns.
#include "neon.h"

namespace jetdraft {
namespace {

struct Dotprod : Neon {
  template <int BITS, int COUNT>
  static int32x4_t dot(const Quads* quads, const int8_t* x, int32_t start) {
    int32x4_t sum = vdupq_n_s32(start);
    for (int t = 0; t < COUNT; t += 4) {
      const int8x16_t read = vld1q_s8(x + 4 * t);
      sum = vdotq_laneq_s32(sum, quads[t], read, 0);
      sum = vdotq_laneq_s32(sum, quads[t + 1], read, 1);
      sum = vdotq_laneq_s32(sum, quads[t + 2], read, 2);
      sum = vdotq_laneq_s32(sum, quads[t + 3], read, 3);
    }
    return sum;
  }
};

}  // namespace

extern const Isa DOTPROD = isa<Dotprod>("dotprod", [] {
  constexpr unsigned long ASIMDDP = 1ul << 20;
  return (getauxval(AT_HWCAP) & ASIMDDP) != 0;
});

}  // namespace jetdraft
