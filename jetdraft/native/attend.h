// Attention of a pass's rows over a buffer of keys and values.
//
// A score adds its products in one order, and sums over keys go from the first visible
// key to the last. A hidden key adds a zero. So a row's result depends on the visible
// keys and their order alone: neither on the other rows, nor on threads, nor on the
// slots where the keys lie. All processors get the same bits.
//
// Each processor's file includes this header with its own compiler flags, so all of it
// has internal linkage.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "format.h"

namespace jetdraft {
namespace {

constexpr int LANES = Attention::LANES, KEYS = 4;
constexpr int SUMS = 8;  // that a loop over keys holds in registers
constexpr int64_t TILE_BYTES = 1 << 14;  // of keys that all rows read in turn

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));

template <class V = Lanes>
inline V load(const float* p) {
  V lanes;
  std::memcpy(&lanes, p, sizeof lanes);
  return lanes;
}
template <class V>
inline void store(float* p, V lanes) {
  std::memcpy(p, &lanes, sizeof lanes);
}

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
#if __has_builtin(__builtin_elementwise_fma)
  return __builtin_elementwise_fma(a, b, c);
#else  // g++
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// The sums of two vectors over lanes 0 and 2, 1 and 3 and so on, beside each other.
inline Lanes half_sums(Lanes a, Lanes b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
         __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
}

// The sums of four vectors over their lanes, all in one order.
inline void sum_lanes(const Lanes* x, float* y) {
  const Lanes a = half_sums(x[0], x[1]), b = half_sums(x[2], x[3]);
  const Lanes both = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
                     __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  const auto four = __builtin_shufflevector(both, both, 0, 1, 2, 3) +
                    __builtin_shufflevector(both, both, 4, 5, 6, 7);
  std::memcpy(y, &four, sizeof four);
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

// cap tanh(x / cap)
inline Lanes capped(Lanes x, float cap) {
  const Lanes size = (x < 0.0f ? -x : x) / cap;
  const Lanes e = exponential(-2.0f * size), y = (1.0f - e) / (1.0f + e) * cap;
  return x < 0.0f ? -y : y;
}

// The products of N queries, which follow each other, with KEYS keys.
template <int N>
inline void multiply_keys(const float* q, const float* const* keys, int64_t size,
                          float (*scores)[KEYS]) {
  Lanes sums[N][KEYS] = {};
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES) {
    Lanes part[N];
#pragma unroll
    for (int n = 0; n < N; n++) part[n] = load(q + n * size + d);
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
      const Lanes key = load(keys[k] + d);
#pragma unroll
      for (int n = 0; n < N; n++) sums[n][k] = fused(part[n], key, sums[n][k]);
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) sum_lanes(sums[n], scores[n]);
  for (; d < size; d++)
    for (int n = 0; n < N; n++)
      for (int k = 0; k < KEYS; k++)
        scores[n][k] = fused(q[n * size + d], keys[k][d], scores[n][k]);
}

// Adds values [keys][size], times the shares of N heads, to COUNT vectors of each y; and
// shares to totals, if these are not null. Lines are the distance of shares and totals.
template <class V, int N, int COUNT>
inline void add_values(const float* shares, int64_t line, const float* values,
                       int64_t keys, int64_t size, float* y, float* totals) {
  constexpr int step = sizeof(V) / sizeof(float);
  V sums[N][COUNT];
  float total[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    total[n] = totals == nullptr ? 0.0f : totals[n * line];
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[n][i] = load<V>(y + n * size + i * step);
  }
  for (int64_t t = 0; t < keys; t++, values += size) {
    V value[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) value[i] = load<V>(values + i * step);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float share = shares[n * line + t];
      total[n] += share;
#pragma unroll
      for (int i = 0; i < COUNT; i++) sums[n][i] = fused(V{} + share, value[i], sums[n][i]);
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) {
    if (totals != nullptr) totals[n * line] = total[n];
#pragma unroll
    for (int i = 0; i < COUNT; i++) store(y + n * size + i * step, sums[n][i]);
  }
}

// Turns scores into shares: e^(score - largest score). Writes up to the next whole vector.
inline void to_shares(float* scores, int64_t count, const float* bias, float softcap) {
  if (softcap > 0.0f)
    for (int64_t t = 0; t < count; t += LANES)
      store(scores + t, capped(load(scores + t), softcap));
  if (bias != nullptr)
    for (int64_t t = 0; t < count; t++) scores[t] += bias[t];
  for (int64_t t = count; t % LANES != 0; t++) scores[t] = -__builtin_inff();
  Lanes most = load(scores);
  for (int64_t t = LANES; t < count; t += LANES) {
    const Lanes x = load(scores + t);
    most = x > most ? x : most;
  }
  float largest = most[0];
  for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
  for (int64_t t = 0; t < count; t += LANES)
    store(scores + t, exponential(load(scores + t) - largest));
}

template <int N>
using Heads = std::integral_constant<int, N>;

// Some rows and some heads, which share a head of keys and values. `scratch` has a line
// of `Attention::line` numbers for each row and head.
void attend(const Attention& a, const Attention::Part& part, float* scratch) {
  const int64_t line = a.line(), size = a.size;
  const int64_t buffer = part.first_head / (a.heads / a.kv_heads) * a.capacity * size;
  const float *keys = a.keys + buffer, *values = a.values + buffer;
  // Heads in pairs, which read a key or a value once. The function gets their number, the
  // row, the first head, its line, and the slots that the row sees.
  const auto each = [&](auto function) {
    float* at = scratch;
    for (int64_t row = part.first_row; row < part.last_row; row++) {
      const int64_t end = a.cursor + row + 1;
      const int64_t begin = a.window > 0 ? std::max<int64_t>(0, end - a.window) : 0;
      int64_t head = part.first_head;
      for (; head + 2 <= part.last_head; head += 2, at += 2 * line)
        function(Heads<2>{}, row, head, at, begin, end);
      for (; head < part.last_head; head++, at += line)
        function(Heads<1>{}, row, head, at, begin, end);
    }
  };
  const int64_t last = a.cursor + part.last_row, seen = a.cursor + part.first_row + 1;
  const int64_t start = a.window > 0 ? std::max<int64_t>(0, seen - a.window) : 0;
  const int64_t tile = std::max<int64_t>(KEYS, TILE_BYTES / (size * sizeof(float)));
  for (int64_t from = start; from < last; from += tile)
    each([&](auto heads, int64_t row, int64_t head, float* scores, int64_t begin,
             int64_t end) {
      const float* q = a.queries + (row * a.heads + head) * size;
      const int64_t until = std::min(from + tile, end);
      for (int64_t t = std::max(from, begin); t < until; t += KEYS) {
        // Instead of keys beyond the last, it again: their scores are not read.
        const float* some[KEYS];
        float products[heads][KEYS];
        for (int k = 0; k < KEYS; k++) some[k] = keys + std::min(t + k, until - 1) * size;
        multiply_keys<heads>(q, some, size, products);
        for (int n = 0; n < heads; n++)
          std::memcpy(scores + n * line + t, products[n], sizeof products[n]);
      }
    });
  each([&](auto heads, int64_t row, int64_t head, float* scores, int64_t begin,
           int64_t end) {
    const float* bias = a.bias == nullptr ? nullptr : a.bias + row * a.bias_slots + begin;
    for (int n = 0; n < heads; n++, scores += line) {
      const float* own = bias == nullptr ? nullptr : bias + (head + n) * a.bias_head;
      to_shares(scores + begin, end - begin, own, a.softcap);
      scores[line - 1] = 0.0f;  // the total
    }
    std::memset(a.y + (row * a.heads + head) * size, 0, heads * size * sizeof(float));
  });
  for (int64_t from = start; from < last; from += tile)
    each([&](auto heads, int64_t row, int64_t head, float* shares, int64_t begin,
             int64_t end) {
      const int64_t first = std::max(from, begin), until = std::min(from + tile, end);
      const auto add = [&](auto vectors, auto* add_some, int64_t d) {
        add_some(shares + first, line, values + first * size + d, until - first, size,
                 a.y + (row * a.heads + head) * size + d,
                 d == 0 ? shares + line - 1 : nullptr);
        return d + vectors;
      };
      constexpr int N = heads, COUNT = SUMS / N;
      int64_t d = 0;
      while (d + COUNT * LANES <= size) d = add(COUNT * LANES, add_values<Lanes, N, COUNT>, d);
      while (d + LANES <= size) d = add(LANES, add_values<Lanes, N, 1>, d);
      while (d < size) d = add(1, add_values<float, N, 1>, d);
    });
  each([&](auto heads, int64_t row, int64_t head, float* shares, int64_t, int64_t) {
    float* y = a.y + (row * a.heads + head) * size;
    for (int n = 0; n < heads; n++, y += size, shares += line)
      for (int64_t d = 0; d < size; d++) y[d] /= shares[line - 1];
  });
}

}  // namespace
}  // namespace jetdraft
