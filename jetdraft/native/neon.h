// What all Arm processors have in common: 4 columns in a register of 128 bits.
#pragma once
#include <arm_neon.h>

#include "product.h"

namespace jetdraft {
namespace {

struct Neon {
  static constexpr int LANES = 4, MAX_ROWS = 8, BYTE_OFFSET = 0;
  using Floats = float32x4_t;
  using Ints = int32x4_t;

  static float32x4_t floats(float number) { return vdupq_n_f32(number); }
  static float32x4_t halves(const uint8_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
  }
  static float32x4_t bytes(const uint8_t* p) {
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load4(p)))));
  }
  static float32x4_t signed_bytes(const uint8_t* p) {
    return convert(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load4(p))))));
  }
  static float32x4_t negative(float32x4_t a) { return vnegq_f32(a); }
  static float32x4_t multiply(float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }
  static float32x4_t fused(float32x4_t a, float32x4_t b, float32x4_t c) {
    return vfmaq_f32(c, a, b);
  }
  static float32x4_t convert(int32x4_t a) { return vcvtq_f32_s32(a); }
  static void store(float* y, float32x4_t a) { vst1q_f32(y, a); }

 protected:
  // Quad t of 4 columns of the block at w, a byte for each number.
  template <int BITS>
  static int8x16_t unpack(const uint8_t* w, int t) {
    if constexpr (BITS == 8) return vreinterpretq_s8_u8(vld1q_u8(w + 64 * t));
    if constexpr (BITS == 3) {
      const uint8x16_t none = vdupq_n_u8(0), plane = vld1q_u8(w + 64 * (t / 4));
      const uint8x16_t low = high_bits(none, plane, -2 * (t / 2 % 2), 0x33);
      const uint8x16_t pair = high_bits(low, vld1q_u8(w + 128), 2 - t / 2, 0x44);
      return vreinterpretq_s8_u8(high_bits(none, pair, -4 * (t % 2), 7));
    }
    const uint8x16_t both = vld1q_u8(w + 64 * (t / 2));
    uint8x16_t quad = t % 2 ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    if constexpr (BITS == 5) quad = high_bits(quad, vld1q_u8(w + 256), 4 - t, 16);
    if constexpr (BITS == 6)
      quad = high_bits(quad, vld1q_u8(w + 256 + 64 * (t / 4)), 4 - 2 * (t % 4), 48);
    return vreinterpretq_s8_u8(quad);
  }

 private:
  static uint8x8_t load4(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return vreinterpret_u8_u32(vdup_n_u32(four));
  }
  static uint8x16_t high_bits(uint8x16_t quad, uint8x16_t plane, int left, int mask) {
    const uint8x16_t bits = vshlq_u8(plane, vdupq_n_s8(static_cast<int8_t>(left)));
    return vorrq_u8(quad, vandq_u8(bits, vdupq_n_u8(static_cast<uint8_t>(mask))));
  }
};

}  // namespace
}  // namespace jetdraft
