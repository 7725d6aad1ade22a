// NEON with dot products (Armv8.2, the cores of Orin): SDOT on 4 columns.
#include "neon.h"

namespace jetdraft {
namespace {

struct Dotprod : Neon {
  template <int BITS, int FIRST, int COUNT, int M>
  INLINE static void dots(const uint8_t* w, const RowBlock* read, Ints* n) {
#pragma unroll
    for (int m = 0; m < M; m++) n[m] = vdupq_n_s32(read[m].corrections[FIRST > 0]);
#pragma unroll
    for (int from = FIRST; from < FIRST + COUNT; from += 4) {
      int8x16_t quads[4];
#pragma unroll
      for (int t = 0; t < 4; t++) quads[t] = unpack<BITS>(w, from + t);
#pragma unroll
      for (int m = 0; m < M; m++) {
        const int8x16_t x = vld1q_s8(read[m].q + 4 * from);
        n[m] = vdotq_laneq_s32(n[m], quads[0], x, 0);
        n[m] = vdotq_laneq_s32(n[m], quads[1], x, 1);
        n[m] = vdotq_laneq_s32(n[m], quads[2], x, 2);
        n[m] = vdotq_laneq_s32(n[m], quads[3], x, 3);
      }
    }
  }
};

}  // namespace

extern const Isa DOTPROD = isa<Dotprod>("dotprod", has_dotprod);

}  // namespace jetdraft
