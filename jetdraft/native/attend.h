// Attention of a pass's rows over a buffer of keys and values.
//
// A score adds its products in one order, and sums over keys go from the first visible
// key to the last. So a row's result depends on the visible keys and their order alone:
// neither on the other rows, nor on threads, nor on the slots where the keys lie. All
// processors get the same bits.
//
// Each processor's file includes this header with its own compiler flags, so all of it
// has internal linkage.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "format.h"

namespace jetdraft {
namespace {

constexpr int LANES = Attention::LANES, LANES_AT_ONCE = 4, KEYS_AT_ONCE = 4;
constexpr int64_t TILE = 64;  // keys that all rows read in turn, while they are cached

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Lanes load(const float* p) {
  Lanes lanes;
  std::memcpy(&lanes, p, sizeof lanes);
  return lanes;
}
inline void store(float* p, Lanes lanes) { std::memcpy(p, &lanes, sizeof lanes); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return __builtin_elementwise_fma(a, b, c); }

inline float sum(Lanes x) {
  const auto eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                    __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// e^x for x <= 0, within 2 units of the last place; 0 below -87.
inline Lanes exponential(Lanes x) {
  const Lanes bounded = x > -87.0f ? x : Lanes{} - 87.0f;  // also NaN
  // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
  const Lanes shifted = fused(bounded, Lanes{} + 0x1.715476p+0f, Lanes{} + 0x1.8p23f);
  const Lanes n = shifted - 0x1.8p23f;
  Lanes r = fused(n, Lanes{} - 0x1.62e4p-1f, bounded);
  r = fused(n, Lanes{} - 0x1.7f7d1cp-20f, r);
  Lanes y = Lanes{} + 1.9875691500e-4f;  // Cephes' polynomial
  for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                       1.6666665459e-1f, 5.0000001201e-1f})
    y = fused(y, r, Lanes{} + factor);
  y = fused(y, r * r, r) + 1.0f;
  const Integers power = ((Integers)shifted - (Integers)(Lanes{} + 0x1.8p23f) + 127) << 23;
  const Lanes result = y * (Lanes)power;
  return x >= -87.0f ? result : x == x ? Lanes{} : x;
}

// The products of one query with COUNT keys that follow each other.
template <int COUNT>
inline void scores_of(const float* q, const float* keys, int64_t size, float* scores) {
  Lanes sums[COUNT] = {};
  for (int64_t d = 0; d < size; d += LANES) {
    const Lanes part = load(q + d);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      sums[i] = fused(part, load(keys + i * size + d), sums[i]);
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) scores[i] = sum(sums[i]);
}

// Adds values [keys][size] times their shares to y.
template <int COUNT>
inline void add_values(const float* shares, const float* values, int64_t keys,
                       int64_t size, float* y) {
  Lanes sums[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) sums[i] = load(y + i * LANES);
  for (int64_t t = 0; t < keys; t++, values += size)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      sums[i] = fused(Lanes{} + shares[t], load(values + i * LANES), sums[i]);
#pragma unroll
  for (int i = 0; i < COUNT; i++) store(y + i * LANES, sums[i]);
}

// Turns scores into shares that add up to the result.
inline float to_shares(float* scores, int64_t count) {
  float largest = scores[0], total = 0.0f;
  for (int64_t t = 1; t < count; t++) largest = scores[t] > largest ? scores[t] : largest;
  for (int64_t t = 0; t < count; t += LANES)
    store(scores + t, exponential(load(scores + t) - largest));
  for (int64_t t = 0; t < count; t++) total += scores[t];
  return total;
}

// Some rows and some heads, which share a head of keys and values. `scratch` has a line
// of `Attention::line` numbers for each row and head.
void attend(const Attention& a, const Attention::Part& part, float* scratch) {
  const int64_t line = a.line(), heads = part.last_head - part.first_head;
  const int64_t kv_head = part.first_head / (a.heads / a.kv_heads);
  const float* keys = a.keys + kv_head * a.capacity * a.size;
  const float* values = a.values + kv_head * a.capacity * a.size;
  const auto each = [&](auto function) {
    float* at = scratch;
    for (int64_t row = part.first_row; row < part.last_row; row++) {
      const int64_t end = a.cursor + row + 1;
      const int64_t begin = a.window > 0 ? std::max<int64_t>(0, end - a.window) : 0;
      for (int64_t head = 0; head < heads; head++, at += line)
        function(row, part.first_head + head, at, begin, end);
    }
  };
  const int64_t last = a.cursor + part.last_row;
  for (int64_t from = 0; from < last; from += TILE)
    each([&](int64_t row, int64_t head, float* scores, int64_t begin, int64_t end) {
      const float* q = a.queries + (row * a.heads + head) * a.size;
      int64_t t = std::max(from, begin);
      const int64_t first = t, until = std::min(from + TILE, end);
      for (; t + KEYS_AT_ONCE <= until; t += KEYS_AT_ONCE)
        scores_of<KEYS_AT_ONCE>(q, keys + t * a.size, a.size, scores + t);
      for (; t < until; t++) scores_of<1>(q, keys + t * a.size, a.size, scores + t);
      for (t = first; t < until; t++) {
        scores[t] *= a.scale;
        if (a.bias != nullptr)
          scores[t] += a.bias[head * a.bias_head + row * a.bias_slots + t];
      }
    });
  each([&](int64_t row, int64_t head, float* scores, int64_t begin, int64_t end) {
    scores[line - 1] = to_shares(scores + begin, end - begin);
    std::memset(a.y + (row * a.heads + head) * a.size, 0, a.size * sizeof(float));
  });
  for (int64_t from = 0; from < last; from += TILE)
    each([&](int64_t row, int64_t head, float* shares, int64_t begin, int64_t end) {
      float* y = a.y + (row * a.heads + head) * a.size;
      const int64_t first = std::max(from, begin), until = std::min(from + TILE, end);
      const float* v = values + first * a.size;
      int64_t d = 0;
      for (; d + LANES_AT_ONCE * LANES <= a.size; d += LANES_AT_ONCE * LANES)
        add_values<LANES_AT_ONCE>(shares + first, v + d, until - first, a.size, y + d);
      for (; d < a.size; d += LANES)
        add_values<1>(shares + first, v + d, until - first, a.size, y + d);
    });
  each([&](int64_t row, int64_t head, float* shares, int64_t, int64_t) {
    float* y = a.y + (row * a.heads + head) * a.size;
    for (int64_t d = 0; d < a.size; d++) y[d] /= shares[line - 1];
  });
}

}  // namespace
}  // namespace jetdraft
