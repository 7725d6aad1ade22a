// Compares every processor's products, attention and states with the portable ones,
// bit by bit: all formats, whole and cut blocks and groups, passes of 1 to 19 rows and each
// row by itself. Prints a line for each processor; ends with 1 if two numbers differ. With an
// argument it takes all processors, whose instructions are then emulated.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../jetdraft/native/format.h"

using namespace jetdraft;

namespace {

uint32_t state;

uint32_t random_bits() {  // a linear congruential generator, its better half
  state = state * 1664525u + 1013904223u;
  return state >> 16;
}

// Needs no C++ runtime, so that it is compiled for any machine in seconds.
template <class T>
struct Array {
  int64_t size;
  T* at;
  explicit Array(int64_t count)
      : size(count), at((T*)std::calloc(size_t(count), sizeof(T))) {}
  Array(const Array&) = delete;
  ~Array() { std::free(at); }
};

struct Matrix {
  int format;
  int64_t columns, numbers, padded;
  Array<uint8_t> integers, scales;

  static int64_t unit(int format) {
    return has_supers(FORMATS[format].scales) ? SUPER : BLOCK;
  }
  static int64_t groups(int64_t columns) { return (columns + GROUP - 1) / GROUP; }

  Matrix(int number, int64_t n, int64_t k)
      : format(number), columns(n), numbers(k), padded(round_up(k, unit(number))),
        integers(groups(n) * padded / BLOCK * block_bytes(FORMATS[number].bits)),
        scales(groups(n) * padded / unit(number) * scale_bytes(FORMATS[number].scales)) {
    for (int64_t i = 0; i < integers.size; i++) integers.at[i] = uint8_t(random_bits());
    for (int64_t i = 0; i < scales.size; i++) scales.at[i] = uint8_t(random_bits());
    // Halves come first in each unit, and must be finite; some are subnormal.
    const Scales kind = FORMATS[number].scales;
    const bool one = kind == Scales::HALF || kind == Scales::SUPER_HALVES;
    for (int64_t start = 0; start < scales.size; start += scale_bytes(kind))
      for (int i = 0; i < (one ? 16 : 32); i++) {
        uint8_t& high = scales.at[start + 2 * i + 1];
        high = uint8_t((high & 0x83) | (i % 5 == 0 ? 0 : 0x28));
      }
  }

  void multiply(const Isa& isa, Product p) const {
    const Array<RowBlock> read(p.rows * padded / BLOCK);
    p.columns = columns, p.numbers = numbers, p.padded = padded, p.read = read.at;
    p.integers = integers.at, p.scales = scales.at, p.linear = 1.5f, p.cubic = 0.25f;
    const int64_t blocks = padded / BLOCK, part = p.rows == 1 ? blocks / 3 : 0;
    for (int64_t row = 0; row < p.rows; row++) {
      isa.quantize[format](p, row, 0, part);
      isa.quantize[format](p, row, part, blocks);
    }
    isa.multiply[format](p, 0, groups(columns));
  }
};

bool equal(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, size_t(count) * sizeof(float)) == 0;
}

// Whether a pass of `rows` rows has the portable bits, and each row alone, quantized in two
// parts, has them too; with gates in every second pass and a bias in every third.
bool agrees(const Isa& isa, const Matrix& matrix, int64_t rows) {
  const bool is_gated = (matrix.columns + rows) % 2 == 0;
  const int64_t n = matrix.columns, k = matrix.numbers * (is_gated ? 2 : 1);
  Array<float> x(rows * k), y(rows * n), expected(rows * n), alone(n), bias(n);
  for (int64_t i = 0; i < n; i++) bias.at[i] = float(random_bits()) / 32768 - 1;
  for (int64_t i = 0; i < x.size; i++) {
    x.at[i] = (float(random_bits()) - 32768) / (i % 97 ? 32768 : 32);
    if (rows > 2 && i / k == 2) x.at[i] = 0;
  }
  Product p{.rows = rows, .x = x.at, .y = y.at, .is_gated = is_gated};
  if (rows % 3 == 0) p.bias = bias.at;
  matrix.multiply(isa, p);
  p.y = expected.at, matrix.multiply(PORTABLE, p);
  bool same = equal(y.at, expected.at, y.size);
  p.rows = 1, p.y = alone.at;
  for (int64_t row = 0; row < rows; row++, p.x += k) {
    matrix.multiply(isa, p);
    same &= equal(y.at + row * n, alone.at, n);
  }
  return same;
}

// Each head of keys by itself, for all rows.
void attend(const Isa& isa, const Attention& a) {
  const int64_t group = a.heads / a.kv_heads;
  const Array<float> scratch(a.rows * group * a.line());
  for (int64_t head = 0; head < a.heads; head += group)
    isa.attend(a, {0, a.rows, head, head + group}, scratch.at);
}

// Whether attention of this shape has the portable bits, and each row alone has them too.
bool agrees(const Isa& isa, Attention a) {
  const int64_t width = a.heads * a.size, buffer = a.kv_heads * a.capacity * a.size;
  Array<float> queries(a.rows * width), keys(buffer), values(buffer),
      bias(a.rows * a.bias_slots), y(a.rows * width), expected(a.rows * width), alone(width);
  const Array<float>* inputs[] = {&queries, &keys, &values, &bias};
  for (const Array<float>* one : inputs)
    for (int64_t i = 0; i < one->size; i++) one->at[i] = float(random_bits()) / 32768 - 1;
  a.queries = queries.at, a.keys = keys.at, a.values = values.at;
  if (a.bias_slots > 0) a.bias = bias.at;
  a.y = expected.at, attend(PORTABLE, a);
  a.y = y.at, attend(isa, a);
  bool same = equal(y.at, expected.at, y.size);
  Attention one = a;
  one.rows = 1, one.y = alone.at;
  for (int64_t row = 0; row < a.rows; row++, one.cursor++, one.queries += width) {
    if (a.bias != nullptr) one.bias = a.bias + row * a.bias_slots;
    attend(isa, one);
    same &= equal(y.at + row * width, alone.at, width);
  }
  return same;
}

// Whether the states and answers of rows have the portable bits, and those of the same rows
// in two turns have them too, whose first leaves its last row to the second.
bool agrees(const Isa& isa, Recurrence r, bool has_beta) {
  const int64_t keys = r.key_heads * r.key, values = r.heads * r.value, n = r.count;
  const int64_t width = 2 * keys + values + 2 * r.heads;
  const Array<float> numbers(n * width), scratch(r.key * Recurrence::COLUMNS);
  const Array<Recurrence::Row> rows(n);
  for (int64_t i = 0; i < numbers.size; i++)
    numbers.at[i] = (float(random_bits()) / 32768 - 1) / 4;
  const auto run = [&](const Isa& by, const Array<float>& state, float* y, int64_t from,
                       int64_t lasting) {
    for (int64_t t = from; t < n; t++) {
      const float *q = numbers.at + t * width, *k = q + keys, *v = k + keys;
      const float* gates = v + values;
      rows.at[t] = {q, k, v, gates, has_beta ? gates + r.heads : nullptr, y + t * values};
    }
    r.states = state.at, r.rows = rows.at + from, r.count = n - from, r.lasting = lasting;
    for (int64_t head = 0; head < r.heads; head++) by.recur(r, head, scratch.at);
  };
  const int64_t size = r.heads * r.key * r.value;
  const Array<float> expected(size), whole(size), parts(size), answers(n * values),
      y(n * values), again(n * values);
  run(PORTABLE, expected, answers.at, 0, n);
  run(isa, whole, y.at, 0, n);
  run(isa, parts, again.at, 0, n - 1);
  run(isa, parts, again.at, n - 1, 1);
  return equal(expected.at, whole.at, size) && equal(expected.at, parts.at, size) &&
         equal(answers.at, y.at, y.size) && equal(answers.at, again.at, y.size);
}

bool agrees(const Isa& isa, Convolution c, int64_t rows) {
  const Array<float> window(c.size * c.channels), x(rows * c.channels),
      weights(c.size * c.channels), y(rows * c.channels), expected(rows * c.channels);
  const Array<float>* inputs[] = {&window, &x, &weights};
  for (const Array<float>* one : inputs)
    for (int64_t i = 0; i < one->size; i++) one->at[i] = float(random_bits()) / 32768 - 1;
  c.window = window.at, c.rows = x.at, c.weights = weights.at;
  c.bias = rows % 2 == 0 ? x.at : nullptr;
  for (int64_t row = 0; row < rows; row++) {
    c.y = y.at, isa.convolve(c, row);
    c.y = expected.at, PORTABLE.convolve(c, row);
  }
  return equal(y.at, expected.at, y.size);
}

constexpr Recurrence RECURRENCES[] = {
    {.heads = 2, .key_heads = 2, .key = 128, .value = 128},
    {.heads = 4, .key_heads = 2, .key = 16, .value = 83},
    {.heads = 3, .key_heads = 1, .key = 8, .value = 20},
};
constexpr bool HAS_BETA[] = {false, true};
constexpr Convolution CONVOLUTIONS[] = {{.channels = 48, .size = 4},
                                        {.channels = 7, .size = 3}};

constexpr float SINKS[] = {-1.5f, 0.25f};
constexpr Attention ATTENTIONS[] = {
    {.heads = 4, .kv_heads = 2, .size = 64, .cursor = 70, .capacity = 99},
    {.heads = 3, .kv_heads = 1, .size = 20, .cursor = 5, .capacity = 30, .window = 7},
    {.heads = 2, .kv_heads = 2, .size = 7, .capacity = 20, .softcap = 0.5f,
     .sinks = SINKS},
    {.heads = 6, .kv_heads = 2, .size = 128, .cursor = 40, .capacity = 60, .bias_slots = 60},
};

struct Size {
  int64_t columns, numbers;
};

constexpr Size SIZES[] = {{16, 256}, {48, 512}, {7, 40}, {33, 1000}, {160, 31}};
constexpr int64_t WIDTHS[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 19};

}  // namespace

int main(int count, char**) {
  int all_wrong = 0;
  for (const Isa* const* isa = ISAS; *isa != nullptr; isa++) {
    if (count == 1 && !(*isa)->runs()) continue;
    int products = 0, attentions = 0, states = 0, wrong = 0;
    state = 0;
    for (int format = 0; format < FORMAT_COUNT; format++)
      for (const Size& size : SIZES) {
        const Matrix matrix(format, size.columns, size.numbers);
        for (const int64_t rows : WIDTHS) {
          products++;
          wrong += !agrees(**isa, matrix, rows);
        }
      }
    for (Attention a : ATTENTIONS)
      for (const int64_t rows : WIDTHS) {
        a.rows = rows, attentions++;
        wrong += !agrees(**isa, a);
      }
    for (const int64_t rows : WIDTHS) {
      for (Recurrence r : RECURRENCES)
        for (const bool has_beta : HAS_BETA) {
          r.count = rows, states++;
          wrong += !agrees(**isa, r, has_beta);
        }
      for (const Convolution& c : CONVOLUTIONS) states++, wrong += !agrees(**isa, c, rows);
    }
    std::printf("%s: %d products, %d attentions, %d states, %d differ\n", (*isa)->name,
                products, attentions, states, wrong);
    all_wrong += wrong;
  }
  return all_wrong != 0;
}
