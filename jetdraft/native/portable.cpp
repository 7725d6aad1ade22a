// Plain C++ for any processor, and the oracle of the others.
#include <cmath>

#include "product.h"

namespace jetdraft {
namespace {

float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31,
                 fraction = half & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float tiny = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

struct Portable {
  static constexpr int LANES = 4, MAX_ROWS = 4, BYTE_OFFSET = 0;
  struct Floats { float at[LANES]; };
  struct Ints { int32_t at[LANES]; };

  template <class Function>
  static Floats each(Function function) {
    Floats result;
    for (int i = 0; i < LANES; i++) result.at[i] = function(i);
    return result;
  }
  static Floats floats(float number) { return each([&](int) { return number; }); }
  static Floats halves(const uint8_t* p) {
    return each([&](int i) {
      return half_to_float(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8));
    });
  }
  static Floats bytes(const uint8_t* p) { return each([&](int i) { return p[i]; }); }
  static Floats signed_bytes(const uint8_t* p) {
    return each([&](int i) { return static_cast<int8_t>(p[i]); });
  }
  static Floats negative(Floats a) { return each([&](int i) { return -a.at[i]; }); }
  static Floats multiply(Floats a, Floats b) {
    return each([&](int i) { return a.at[i] * b.at[i]; });
  }
  static Floats fused(Floats a, Floats b, Floats c) {
    return each([&](int i) { return std::fma(a.at[i], b.at[i], c.at[i]); });
  }
  static Floats convert(Ints a) {
    return each([&](int i) { return static_cast<float>(a.at[i]); });
  }
  static void store(float* y, Floats a) { std::memcpy(y, a.at, sizeof a.at); }

  template <int BITS, int FIRST, int COUNT, int M>
  INLINE static void dots(const uint8_t* w, const RowBlock* read, Ints* n) {
    for (int m = 0; m < M; m++)
      for (int& sum : n[m].at) sum = read[m].corrections[FIRST > 0];
    for (int t = FIRST; t < FIRST + COUNT; t++)
      for (int i = 0; i < 4 * LANES; i++) {
        const int number = number_at(w, BITS, t, i);
        for (int m = 0; m < M; m++) n[m].at[i / 4] += number * read[m].q[4 * t + i % 4];
      }
  }
};

}  // namespace

extern const Isa PORTABLE = isa<Portable>("portable", [] { return true; });

}  // namespace jetdraft
