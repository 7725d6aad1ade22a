// Layers with a recurrent state: linear attention, and causal convolutions.
//
// A lane is a column of a state, or a channel, so sums never cross lanes: a row's result
// depends on the rows before it alone, and all processors get the same bits.
//
// Each processor's file includes this header with its own compiler flags, so all of it
// has internal linkage.
#pragma once
#include "attend.h"

namespace jetdraft {
namespace {

typedef float Wide __attribute__((vector_size(16 * sizeof(float))));

// Some columns of a head's matrix; a line is the distance of its rows.
struct Columns {
  float* at;
  int64_t line;
};

// Lets a row change COUNT vectors of columns, read at `from` and written at `to`, and
// computes its answer in these columns.
template <class V, int COUNT>
void take_row(const Recurrence& r, const Recurrence::Row& row, int64_t head,
              int64_t column, Columns from, Columns to) {
  constexpr int step = sizeof(V) / sizeof(float);
  const int64_t shared = head / (r.heads / r.key_heads) * r.key;
  const int64_t place = head * r.value + column;
  float decay = exponential(Lanes{} + row.decay[head])[0];
  V value[COUNT], answer[COUNT] = {};
#pragma unroll
  for (int i = 0; i < COUNT; i++) value[i] = load<V>(row.value + place + i * step);
  if (row.beta != nullptr) {
    V known[COUNT] = {};
    for (int64_t k = 0; k < r.key; k++) {
      const V key = V{} + row.key[shared + k];
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const V state = load<V>(from.at + k * from.line + i * step) * decay;
        known[i] = fused(key, state, known[i]);
        store(to.at + k * to.line + i * step, state);
      }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) value[i] = (value[i] - known[i]) * row.beta[head];
    from = to, decay = 1.0f;
  }
  for (int64_t k = 0; k < r.key; k++) {
    const V key = V{} + row.key[shared + k];
    const V query = V{} + (row.y == nullptr ? 0.0f : row.query[shared + k]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const V state = load<V>(from.at + k * from.line + i * step) * decay;
      const V after = fused(key, value[i], state);
      answer[i] = fused(query, after, answer[i]);
      store(to.at + k * to.line + i * step, after);
    }
  }
  if (row.y == nullptr) return;
#pragma unroll
  for (int i = 0; i < COUNT; i++) store(row.y + place + i * step, answer[i]);
}

// All rows of a head.
void recur(const Recurrence& r, int64_t head, float* scratch) {
  const auto take = [&](auto* take_some, int step, int64_t column) {
    const Columns own{r.states + head * r.key * r.value + column, r.value};
    const Columns copy{scratch, Recurrence::COLUMNS};
    for (int64_t t = 0; t < r.count; t++)
      take_some(r, r.rows[t], head, column, t <= r.lasting ? own : copy,
                t < r.lasting ? own : copy);
    return column + step;
  };
  int64_t c = 0;
  while (c + 64 <= r.value) c = take(take_row<Wide, 4>, 64, c);
  while (c + 16 <= r.value) c = take(take_row<Wide, 1>, 16, c);
  while (c < r.value) c = take(take_row<float, 1>, 1, c);
}

template <class V>
inline void convolve_channels(const Convolution& c, int64_t row, int64_t channel) {
  V sum = c.bias == nullptr ? V{} : load<V>(c.bias + channel);
  for (int64_t i = 0; i < c.size; i++)
    sum = fused(load<V>(c.row(row + i) + channel),
                load<V>(c.weights + i * c.channels + channel), sum);
  store(c.y + row * c.channels + channel, sum);
}

void convolve(const Convolution& c, int64_t row) {
  int64_t channel = 0;
  for (; channel + 16 <= c.channels; channel += 16) convolve_channels<Wide>(c, row, channel);
  for (; channel < c.channels; channel++) convolve_channels<float>(c, row, channel);
}

}  // namespace
}  // namespace jetdraft
