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
template <class V>
inline V fused(V a, V b, V c) {
#if __has_builtin(__builtin_elementwise_fma)
  return __builtin_elementwise_fma(a, b, c);
#else  // g++
  for (size_t i = 0; i < sizeof c / sizeof(float); i++)
    c[i] = __builtin_fmaf(a[i], b[i], c[i]);
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
// Returns the share of the sink, or 0.
inline float to_shares(float* scores, int64_t count, const float* bias, float softcap,
                       const float* sink) {
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
  if (sink != nullptr && *sink > largest) largest = *sink;
  for (int64_t t = 0; t < count; t += LANES)
    store(scores + t, exponential(load(scores + t) - largest));
  return sink == nullptr ? 0.0f : exponential(Lanes{} + (*sink - largest))[0];
}

// Heads of a row that follow each other: the row and the first of them, its line of
// scores, which the lines of the others follow, and the slots that the row sees.
struct Some {
  int64_t row, head;
  float* line;
  int64_t begin, end;
};

// Scores of the keys from slot `from` to `until`.
template <int N>
void score(const Attention& a, const Some& s, const float* keys, int64_t from,
           int64_t until) {
  const float* q = a.queries + (s.row * a.heads + s.head) * a.size;
  const int64_t line = a.line();
  until = std::min(until, s.end);
  for (int64_t t = std::max(from, s.begin); t < until; t += KEYS) {
    // Instead of keys beyond the last, it again: these scores are written over.
    const float* some[KEYS];
    float scores[N][KEYS];
    for (int k = 0; k < KEYS; k++) some[k] = keys + std::min(t + k, until - 1) * a.size;
    multiply_keys<N>(q, some, a.size, scores);
    for (int n = 0; n < N; n++)
      std::memcpy(s.line + n * line + t, scores[n], sizeof scores[n]);
  }
}

// Scores become shares. Their totals, in the last places of lines, become the shares of
// sinks or 0, and answers become 0.
template <int N>
void share(const Attention& a, const Some& s) {
  for (int n = 0; n < N; n++) {
    const float* bias = a.bias == nullptr ? nullptr
                        : a.bias + (s.head + n) * a.bias_head + s.row * a.bias_slots;
    float* line = s.line + n * a.line();
    const float* sink = a.sinks == nullptr ? nullptr : a.sinks + s.head + n;
    line[a.line() - 1] = to_shares(line + s.begin, s.end - s.begin,
                                   bias ? bias + s.begin : bias, a.softcap, sink);
  }
  float* y = a.y + (s.row * a.heads + s.head) * a.size;
  std::memset(y, 0, N * a.size * sizeof(float));
}

// Adds the values from slot `from` to `until`, times their shares, to answers.
template <int N>
void mix(const Attention& a, const Some& s, const float* values, int64_t from,
         int64_t until) {
  const int64_t first = std::max(from, s.begin), count = std::min(until, s.end) - first;
  const auto add = [&](auto* add_some, int step, int64_t d) {
    float* total = s.line + a.line() - 1;
    add_some(s.line + first, a.line(), values + first * a.size + d, count, a.size,
             a.y + (s.row * a.heads + s.head) * a.size + d, d == 0 ? total : nullptr);
    return d + step;
  };
  constexpr int COUNT = SUMS / N, STEP = COUNT * LANES;
  int64_t d = 0;
  while (d + STEP <= a.size) d = add(add_values<Lanes, N, COUNT>, STEP, d);
  while (d + LANES <= a.size) d = add(add_values<Lanes, N, 1>, LANES, d);
  while (d < a.size) d = add(add_values<float, N, 1>, 1, d);
}

template <int N>
void divide(const Attention& a, const Some& s) {
  float* y = a.y + (s.row * a.heads + s.head) * a.size;
  for (int n = 0; n < N; n++, y += a.size) {
    const float total = s.line[(n + 1) * a.line() - 1];
    for (int64_t d = 0; d < a.size; d++) y[d] /= total;
  }
}

// Some rows and some heads, which share a head of keys and values. `scratch` has a line
// of `Attention::line` numbers for each row and head.
void attend(const Attention& a, const Attention::Part& part, float* scratch) {
  const int64_t line = a.line();
  const auto begin = [&](int64_t row) {
    return a.window > 0 ? std::max<int64_t>(0, a.cursor + row + 1 - a.window) : 0;
  };
  // Heads in pairs, which read a key or a value once.
  const auto each = [&](auto function) {
    Some s{part.first_row, 0, scratch, 0, 0};
    for (; s.row < part.last_row; s.row++) {
      s.begin = begin(s.row), s.end = a.cursor + s.row + 1, s.head = part.first_head;
      for (; s.head + 2 <= part.last_head; s.head += 2, s.line += 2 * line)
        function(std::integral_constant<int, 2>{}, s);
      for (; s.head < part.last_head; s.head++, s.line += line)
        function(std::integral_constant<int, 1>{}, s);
    }
  };
  const int64_t buffer = part.first_head / (a.heads / a.kv_heads) * a.capacity * a.size;
  const float *keys = a.keys + buffer, *values = a.values + buffer;
  const int64_t first = begin(part.first_row), last = a.cursor + part.last_row;
  const int64_t bytes = a.size * int64_t(sizeof(float));
  const int64_t tile = std::max<int64_t>(KEYS, TILE_BYTES / bytes);
  for (int64_t t = first; t < last; t += tile)
    each([&](auto n, const Some& s) { score<n>(a, s, keys, t, t + tile); });
  each([&](auto n, const Some& s) { share<n>(a, s); });
  for (int64_t t = first; t < last; t += tile)
    each([&](auto n, const Some& s) { mix<n>(a, s, values, t, t + tile); });
  each([&](auto n, const Some& s) { divide<n>(a, s); });
}

}  // namespace
}  // namespace jetdraft
