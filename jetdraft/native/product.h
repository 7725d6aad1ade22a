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
#include <cstdint>
#include <cstring>
#include <utility>

#include "attend.h"
#include "format.h"
#include "recur.h"

namespace jetdraft {
namespace {

constexpr int64_t CACHED_BYTES = 1 << 18;  // of a matrix that all rows read in turn
// Weights are fetched so many bytes ahead, since processors stop at the end of a page.
constexpr int64_t AHEAD = 2048;

// Multiplies each number of a block with its gate's g / (1 + e^-z), see `Product`.
inline void multiply_gates(const Product& p, const float* gates, float* numbers) {
  for (int i = 0; i < BLOCK; i += LANES) {
    const Lanes g = load(gates + i), z = g * (p.linear + p.cubic * g * g);
    const Lanes e = exponential(z < 0.0f ? z : -z);
    const Lanes share = (z < 0.0f ? e : Lanes{} + 1.0f) / (1.0f + e);
    store(numbers + i, g * share * load(numbers + i));
  }
}

// The integers of some blocks of a row: each block is scaled so that its largest number
// becomes 127.
template <class V, int F>
void quantize(const Product& p, int64_t row, int64_t first, int64_t end) {
  constexpr Format f = FORMATS[F];
  constexpr bool halves = f.scales == Scales::SUPER_HALVES;
  constexpr int zero = f.zero + (f.bits == 8 ? V::BYTE_OFFSET : 0);
  const int64_t blocks = p.padded / BLOCK, tile = row - row % V::MAX_ROWS;
  const int64_t tile_rows = std::min<int64_t>(V::MAX_ROWS, p.rows - tile);
  const float* x = p.x + p.place(row) * p.numbers * (p.is_gated ? 2 : 1) + first * BLOCK;
  RowBlock* read = p.read + tile * blocks + (row - tile) + first * tile_rows;
  for (int64_t b = first; b < end; b++, x += BLOCK, read += tile_rows) {
    float numbers[BLOCK] = {};
    const int64_t left = std::clamp<int64_t>(p.numbers - b * BLOCK, 0, BLOCK);
    std::memcpy(numbers, x + (p.is_gated ? p.numbers : 0), left * sizeof(float));
    if (p.is_gated) {
      float gates[BLOCK] = {};
      std::memcpy(gates, x, left * sizeof(float));
      multiply_gates(p, gates, numbers);
    }
    // The bits of magnitudes are in the order of the magnitudes, NaN last.
    uint32_t largest_bits = 0;
    for (float number : numbers)
      largest_bits = std::max(largest_bits, std::bit_cast<uint32_t>(number) & ~(1u << 31));
    const float largest = std::bit_cast<float>(largest_bits);
    float factor = 127.0f / largest;
    if (!(factor <= 3e38f)) factor = largest != largest ? largest : 0.0f;
    int integers[BLOCK], sums[2] = {};
    for (int i = 0; i < BLOCK; i++) {
      float number = numbers[i] * factor;
      number = number > -127.0f ? number : -127.0f;  // also NaN
      number = number < 127.0f ? number : 127.0f;
      // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
      integers[i] = std::bit_cast<int>(number + 0x1.8p23f) - std::bit_cast<int>(0x1.8p23f);
    }
    for (int i = 0; i < BLOCK; i++) read->q[i] = static_cast<int8_t>(integers[i]);
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < BLOCK / 2; i++) sums[half] += integers[half * BLOCK / 2 + i];
    const int sum = sums[0] + sums[1];
    read->scale = factor == 0.0f ? largest * 0.0f : largest / 127.0f;
    read->total = read->scale * static_cast<float>(sum);
    read->corrections[0] = -zero * (halves ? sums[0] : sum);
    read->corrections[1] = -zero * sums[1];
  }
}

// `V::LANES` columns of a group, beginning at lane `lane`, for M rows from `row` on.
template <class V, int F, int M>
void multiply_tile(const Product& p, int64_t group, int lane, int64_t row) {
  constexpr Format f = FORMATS[F];
  constexpr bool supers = has_supers(f.scales);
  constexpr bool minima = f.scales == Scales::HALF_MIN || f.scales == Scales::SUPER_MIN;
  constexpr int bytes = block_bytes(f.bits), step = scale_bytes(f.scales);
  const int64_t blocks = p.padded / BLOCK, units = supers ? p.padded / SUPER : blocks;
  const uint8_t* w = p.integers + group * blocks * bytes + 4 * lane;
  const uint8_t* s = p.scales + group * units * step;
  const RowBlock* read = p.read + row * blocks;
  typename V::Floats sum[M];
#pragma unroll
  for (int m = 0; m < M; m++) sum[m] = V::floats(0.0f);
  typename V::Floats d{}, minimum{};
  for (int64_t b = 0; b < blocks; b++, w += bytes, read += M) {
    if (lane == 0)
      for (int line = 0; line < bytes; line += 64) __builtin_prefetch(w + AHEAD + line);
    const int inner = static_cast<int>(b % (SUPER / BLOCK));
    if constexpr (supers) {
      const uint8_t* super = s + b / (SUPER / BLOCK) * step;
      d = V::halves(super + 2 * lane);
      if constexpr (minima) {
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
      if constexpr (minima) minimum = V::halves(s + b * step + 32 + 2 * lane);
    }
    // Adds the integer sums of the block, or of a half of it, to the rows' floats.
    const auto add = [&](const typename V::Ints* n, typename V::Floats d) INLINE {
#pragma unroll
      for (int m = 0; m < M; m++) {
        const auto scale = V::multiply(d, V::floats(read[m].scale));
        sum[m] = V::fused(V::convert(n[m]), scale, sum[m]);
      }
    };
    typename V::Ints n[M];
    if constexpr (f.scales == Scales::SUPER_HALVES) {
      V::template dots<f.bits, 0, QUADS / 2, M>(w, read, n);
      add(n, d);
      V::template dots<f.bits, QUADS / 2, QUADS / 2, M>(w, read, n);
      add(n, minimum);  // here: the second half's scales
    } else {
      V::template dots<f.bits, 0, QUADS, M>(w, read, n);
      add(n, d);
    }
    if constexpr (minima)
#pragma unroll
      for (int m = 0; m < M; m++)
        sum[m] = V::fused(minimum, V::floats(read[m].total), sum[m]);
  }
  const int64_t column = group * GROUP + lane;
#pragma unroll
  for (int m = 0; m < M; m++) {
    float* y = p.y + p.place(row + m) * p.columns + column;
    if (column + V::LANES <= p.columns) {
      V::store(y, sum[m]);
    } else if (column < p.columns) {
      float last[V::LANES];
      V::store(last, sum[m]);
      std::memcpy(y, last, (p.columns - column) * sizeof(float));
    }
    if (p.bias != nullptr)
      for (int64_t i = 0; i < std::min<int64_t>(V::LANES, p.columns - column); i++)
        y[i] += p.bias[column + i];
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
  return {name, runs, {quantize<V, F>...}, {multiply<V, F>...}, attend, recur, convolve};
}

template <class V>
constexpr Isa isa(const char* name, bool (*runs)()) {
  return make_isa<V>(name, runs, std::make_integer_sequence<int, FORMAT_COUNT>{});
}

}  // namespace
}  // namespace jetdraft
