// Products of rows with a matrix, over the vectors `V` of one processor.
//
// A lane is a column, so sums never cross lanes: every processor adds the numbers of a
// column in the same order, with the same fused operations, and gets the same bits. A
// row's result depends on no other row and on no number of threads.
//
// Each processor's file includes this header with its own compiler flags, so all of it
// has internal linkage.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "format.h"

namespace jetdraft {
namespace {

constexpr int64_t CACHED_BYTES = 1 << 18;  // of a matrix that all rows read in turn

// The integers of a row: each block is scaled so that its largest number becomes 127.
template <class V, int F>
void quantize(const Product& p, int64_t row) {
  constexpr Format f = FORMATS[F];
  constexpr int unit = f.scales == Scales::SUPER_HALVES ? BLOCK / 2 : BLOCK;
  constexpr int zero = f.zero + (f.bits == 8 ? V::BYTE_OFFSET : 0);
  const int64_t blocks = p.padded / BLOCK;
  const float* x = p.x + row * p.numbers;
  int8_t* q = p.read.q + row * p.padded;
  for (int64_t b = 0; b < blocks; b++, x += BLOCK, q += BLOCK) {
    float numbers[BLOCK] = {};
    const int64_t left = p.numbers - b * BLOCK;
    std::memcpy(numbers, x, std::clamp<int64_t>(left, 0, BLOCK) * sizeof(float));
    // The bits of magnitudes are in the order of the magnitudes, NaN last.
    uint32_t largest_bits = 0;
    for (float number : numbers)
      largest_bits = std::max(largest_bits, std::bit_cast<uint32_t>(number) & ~(1u << 31));
    const float largest = std::bit_cast<float>(largest_bits);
    float factor = 127.0f / largest;
    if (!(factor <= 3e38f)) factor = largest != largest ? largest : 0.0f;
    int sums[2] = {};
    for (int i = 0; i < BLOCK; i++) {
      float rounded = std::nearbyint(numbers[i] * factor);
      rounded = rounded > -127.0f ? rounded : -127.0f;  // also NaN
      rounded = rounded < 127.0f ? rounded : 127.0f;
      const int integer = static_cast<int>(rounded);
      q[i] = static_cast<int8_t>(integer);
      sums[i / (BLOCK / 2)] += integer;
    }
    const int64_t at = row * blocks + b;
    const float scale = factor == 0.0f ? largest * 0.0f : largest / 127.0f;
    p.read.scales[at] = scale;
    p.read.totals[at] = scale * static_cast<float>(sums[0] + sums[1]);
    if constexpr (unit == BLOCK) {
      p.read.corrections[at] = -zero * (sums[0] + sums[1]);
    } else {
      for (int i : {0, 1}) p.read.corrections[2 * at + i] = -zero * sums[i];
    }
  }
}

// `V::LANES` columns of a group, beginning at lane `lane`, for M rows from `row` on.
template <class V, int F, int M>
void multiply_tile(const Product& p, int64_t group, int lane, int64_t row) {
  constexpr Format f = FORMATS[F];
  constexpr bool supers = has_supers(f.scales);
  constexpr int bytes = block_bytes(f.bits), step = scale_bytes(f.scales);
  const int64_t blocks = p.padded / BLOCK, units = supers ? p.padded / SUPER : blocks;
  const uint8_t* w = p.integers + group * blocks * bytes + 4 * lane;
  const uint8_t* s = p.scales + group * units * step;
  const int8_t* q[M];
  const float *scales[M], *totals[M];
  const int32_t* corrections[M];
  typename V::Floats sum[M];
  for (int m = 0; m < M; m++) {
    const int64_t at = (row + m) * blocks;
    q[m] = p.read.q + (row + m) * p.padded;
    scales[m] = p.read.scales + at;
    totals[m] = p.read.totals + at;
    corrections[m] = p.read.corrections + at * (f.scales == Scales::SUPER_HALVES ? 2 : 1);
    sum[m] = V::floats(0.0f);
  }
  typename V::Floats d{}, minimum{};
  for (int64_t b = 0; b < blocks; b++, w += bytes) {
    typename V::Quads quads[QUADS];
    V::template unpack<f.bits>(w, quads);
    const int inner = static_cast<int>(b % (SUPER / BLOCK));
    if constexpr (supers) {
      const uint8_t* super = s + b / (SUPER / BLOCK) * step;
      d = V::halves(super + 2 * lane);
      if constexpr (f.scales == Scales::SUPER_MIN) {
        minimum = V::multiply(V::negative(V::halves(super + 32 + 2 * lane)),
                              V::bytes(super + 64 + 128 + 16 * inner + lane));
        d = V::multiply(d, V::bytes(super + 64 + 16 * inner + lane));
      } else {
        const uint8_t* factors = super + 32 + 32 * inner + lane;
        minimum = V::multiply(d, V::signed_bytes(factors + 16));
        d = V::multiply(d, V::signed_bytes(factors));
      }
    } else {
      d = V::halves(s + b * step + 2 * lane);
      if constexpr (f.scales == Scales::HALF_MIN)
        minimum = V::halves(s + b * step + 32 + 2 * lane);
    }
    // Adds a row's integer sums of a block, or of a half of it, to its floats.
    const auto add = [&](int m, typename V::Ints n, typename V::Floats d) {
      const auto scale = V::multiply(d, V::floats(scales[m][b]));
      sum[m] = V::fused(V::convert(n), scale, sum[m]);
    };
    constexpr bool halves = f.scales == Scales::SUPER_HALVES;
    constexpr int parts = halves ? 2 : 1, count = QUADS / parts;
    for (int part = 0; part < parts; part++) {
      const auto own = part == 0 ? d : minimum;  // here: the second half's scales
      const auto* w_part = quads + part * count;
      const int64_t x_at = b * BLOCK + part * 4 * count, c_at = parts * b + part;
      if constexpr (requires { V::IN_PAIRS; }) {
        for (int m = 0; m < M; m += 2) {
          const int next = m + 1 < M ? m + 1 : m;
          typename V::Ints n[2];
          V::template dot_pair<f.bits, count>(w_part, q[m] + x_at, q[next] + x_at,
                                              corrections[m][c_at],
                                              corrections[next][c_at], n);
          add(m, n[0], own);
          if (next > m) add(next, n[1], own);
        }
      } else {
        for (int m = 0; m < M; m++)
          add(m, V::template dot<f.bits, count>(w_part, q[m] + x_at, corrections[m][c_at]),
              own);
      }
    }
    if constexpr (f.scales == Scales::HALF_MIN || f.scales == Scales::SUPER_MIN)
      for (int m = 0; m < M; m++)
        sum[m] = V::fused(minimum, V::floats(totals[m][b]), sum[m]);
  }
  const int64_t column = group * GROUP + lane;
  for (int m = 0; m < M; m++) {
    float* y = p.y + (row + m) * p.columns + column;
    if (column + V::LANES <= p.columns) {
      V::store(y, sum[m]);
    } else if (column < p.columns) {
      float last[V::LANES];
      V::store(last, sum[m]);
      std::memcpy(y, last, (p.columns - column) * sizeof(float));
    }
  }
}

template <class V, int F, int... M>
void multiply_rows(int rows, const Product& p, int64_t group, int lane, int64_t row,
                   std::integer_sequence<int, M...>) {
  using Tile = void (*)(const Product&, int64_t, int, int64_t);
  static constexpr Tile tiles[] = {multiply_tile<V, F, M + 1>...};
  tiles[rows - 1](p, group, lane, row);
}

// The columns of some groups: as many groups as fit into the cache, for all rows.
template <class V, int F>
void multiply(const Product& p, int64_t first, int64_t end) {
  constexpr auto sizes = std::make_integer_sequence<int, V::MAX_ROWS>{};
  const int64_t bytes = p.padded / BLOCK * block_bytes(FORMATS[F].bits);
  const int64_t step = std::max<int64_t>(1, CACHED_BYTES / bytes);
  for (int64_t from = first; from < end; from += step) {
    const int64_t to = std::min(end, from + step);
    for (int64_t row = 0; row < p.rows; row += V::MAX_ROWS) {
      const int rows = static_cast<int>(std::min<int64_t>(V::MAX_ROWS, p.rows - row));
      for (int64_t group = from; group < to; group++)
        for (int lane = 0; lane < GROUP; lane += V::LANES)
          multiply_rows<V, F>(rows, p, group, lane, row, sizes);
    }
  }
}

template <class V, int... F>
constexpr Isa make_isa(const char* name, bool (*runs)(),
                       std::integer_sequence<int, F...>) {
  return {name, runs, {quantize<V, F>...}, {multiply<V, F>...}};
}

template <class V>
constexpr Isa isa(const char* name, bool (*runs)()) {
  return make_isa<V>(name, runs, std::make_integer_sequence<int, FORMAT_COUNT>{});
}

}  // namespace
}  // namespace jetdraft
