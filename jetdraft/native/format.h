// How a matrix lies in memory: jetdraft/quant/grids.py writes this layout.
//
// A matrix has N columns of K numbers. Columns stand in groups of 16, the numbers of a
// column in blocks of 32, and these in quads of 4. Bytes [group][block][...]:
//
//   bits 3:      128 bytes, byte 64 p + 4 c + j has bits 0 and 1 of number j of column c
//                of four quads: from bit 0 on of quad 4 p, from 4 on of the next, then
//                from 2 and from 6 on; then 64 bytes, byte 4 c + j has bit 2 of number j
//                of quads 0, 2, 4, 6 and then 1, 3, 5, 7
//   bits 4 to 6: 256 bytes, byte 64 i + 4 c + j has number j of column c of quad 2 i in
//                its low half, and of quad 2 i + 1 in its high half; then
//   bits 5:      64 bytes, bit t of byte 4 c + j is bit 4 of number j of quad t
//   bits 6:      128 bytes, bits 2 s and 2 s + 1 of byte 64 p + 4 c + j are bits 4 and 5
//                of number j of quad 4 p + s
//   bits 8:      512 bytes, byte 64 t + 4 c + j is number j of quad t, signed
//
// So each register that a processor loads has the same quad of several columns, and is
// multiplied with one quad of a row. Scales lie in an array of their own, see `Scales`.
#pragma once
#include <cstdint>

// Of a loop over rows, so that their sums stay in registers.
#define INLINE __attribute__((always_inline))

namespace jetdraft {

constexpr int LAYOUT_VERSION = 1;
constexpr int GROUP = 16, BLOCK = 32, QUADS = 8, SUPER = 256;

enum class Scales {
  HALF,         // [group][block]: 16 halves d;              w = d (q - zero)
  HALF_MIN,     // [group][block]: 16 halves d, 16 halves m; w = d q + m
  SUPER_MIN,    // [group][256 numbers]: 16 halves d, 16 halves m, then for each of
                // 8 blocks 16 bytes s, then so 16 bytes t;  w = d s q - m t
  SUPER_HALVES  // [group][256 numbers]: 16 halves d, then for each of 16 half blocks
                // 16 signed bytes s;                        w = d s (q - zero)
};

struct Format {
  const char* name;
  int bits, zero;
  Scales scales;
};

// In the order of their numbers in graphs, which never change.
constexpr Format FORMATS[] = {
    {"Q4_0", 4, 8, Scales::HALF},       {"Q4_1", 4, 0, Scales::HALF_MIN},
    {"Q5_0", 5, 16, Scales::HALF},      {"Q5_1", 5, 0, Scales::HALF_MIN},
    {"Q8_0", 8, 0, Scales::HALF},       {"Q4_K", 4, 0, Scales::SUPER_MIN},
    {"Q5_K", 5, 0, Scales::SUPER_MIN},  {"Q6_K", 6, 32, Scales::SUPER_HALVES},
    {"Q3_K", 3, 4, Scales::SUPER_HALVES},
};
constexpr int FORMAT_COUNT = sizeof(FORMATS) / sizeof(*FORMATS);

constexpr int block_bytes(int bits) { return 64 * bits; }

constexpr int64_t round_up(int64_t number, int64_t step) {
  return (number + step - 1) / step * step;
}

constexpr bool has_supers(Scales s) {
  return s == Scales::SUPER_MIN || s == Scales::SUPER_HALVES;
}

// A number of quad t of the block at w; `place` is 4 c + j.
INLINE inline int number_at(const uint8_t* w, int bits, int64_t t, int64_t place) {
  if (bits == 8) return static_cast<int8_t>(w[64 * t + place]);
  const auto one = [&](int from) INLINE { return w[from + place] >> t & 1; };
  const auto two = [&](int from) INLINE {
    return w[from + 64 * (t / 4) + place] >> 2 * (t % 4) & 3;
  };
  if (bits == 3) {
    const int64_t low = 4 * (t % 2) + 2 * (t / 2 % 2), high = 4 * (t % 2) + t / 2;
    return (w[64 * (t / 4) + place] >> low & 3) | (w[128 + place] >> high & 1) << 2;
  }
  const int low = w[64 * (t / 2) + place] >> 4 * (t % 2) & 15;
  return bits == 5 ? low | one(256) << 4 : bits == 6 ? low | two(256) << 4 : low;
}

// Bytes of scales for a group of columns and one block, or one super-block of 256.
constexpr int scale_bytes(Scales scales) {
  return scales == Scales::HALF ? 32 : scales == Scales::HALF_MIN ? 64
         : scales == Scales::SUPER_MIN ? 64 + 256 : 32 + 256;
}

// A block of a row as integers. `total` is the scale times the sum of the integers. A
// correction is the sum times minus the integer that stands for zero in the matrix: the
// first of the block, or both of its halves where these have scales of their own.
struct RowBlock {
  int8_t q[BLOCK];
  float scale, total;
  int32_t corrections[2];
};

// A product of rows x [rows][numbers] with a matrix; y is [rows][columns].
// `padded` is `numbers`, rounded up to whole blocks, or super-blocks. Rows are multiplied
// in tiles of some rows; `read` is [tile][padded / BLOCK][rows of the tile]. If `places` is
// given, row i lies at place `places[i]` of x and of y. If the product `is_gated`, x is
// [rows][2][numbers], gates g and numbers, and each number is multiplied with
// g / (1 + e^-z), z = linear g + cubic g^3, first. A bias [columns], if given, is added.
struct Product {
  int64_t columns, numbers, padded, rows;
  const uint8_t *integers, *scales;
  const float* x;
  float* y;
  RowBlock* read;
  const int64_t* places;
  const float* bias;
  bool is_gated;
  float linear, cubic;

  int64_t place(int64_t row) const { return places == nullptr ? row : places[row]; }
};

// Attention of `rows` queries [rows][heads][size], times the scale, whose keys and values
// lie from slot `cursor` on in the buffers [kv_heads][capacity][size]. A row sees the slots
// up to its own, the last `window` of them if it is not 0. A score x becomes softcap
// tanh(x / softcap), if that is not 0, and then a bias [rows][bias_slots] is added, which is
// the same for all heads if `bias_head` is 0. Each of the `sinks` [heads], if given, takes a
// share of its head's rows, as the score of a key whose value is 0.
struct Attention {
  static constexpr int LANES = 8;
  struct Part { int64_t first_row, last_row, first_head, last_head; };

  int64_t heads = 0, kv_heads = 0, size = 0, rows = 0, cursor = 0, capacity = 0, window = 0;
  float softcap = 0.0f;
  const float *queries = nullptr, *keys = nullptr, *values = nullptr, *bias = nullptr,
              *sinks = nullptr;
  int64_t bias_slots = 0, bias_head = 0;
  float* y = nullptr;

  // The scores of a row and a head, whole vectors of them, and last their sum.
  int64_t line() const { return round_up(cursor + rows, LANES) + 2 * LANES; }
};

// Linear attention of rows, in their order, over matrices [heads][key][value]. Queries and
// keys [key_heads][key] are shared by heads that follow each other. For each row a head's
// matrix S decays, and the product of the row's key and value is added to it; with a beta,
// the product of its key and beta (value - key S). The row's answer is query S. Only the
// first `lasting` rows change `states`; the rows after them change a copy.
struct Recurrence {
  static constexpr int64_t COLUMNS = 64;  // of a copy
  struct Row {
    const float *query, *key, *value, *decay, *beta;  // decays are logarithms
    float* y;  // [heads][value], or null
  };

  int64_t heads = 0, key_heads = 0, key = 0, value = 0, count = 0, lasting = 0;
  float* states = nullptr;
  const Row* rows = nullptr;
};

// A convolution of each channel with `size` weights [size][channels]: y[i] is the sum of
// weights and of rows i to i + size - 1, the first size - 1 of which are in the window.
struct Convolution {
  int64_t channels = 0, size = 0;
  const float *window = nullptr, *rows = nullptr, *weights = nullptr, *bias = nullptr;
  float* y = nullptr;

  const float* row(int64_t i) const {
    return i < size - 1 ? window + i * channels : rows + (i - size + 1) * channels;
  }
};

bool has_avx2(), has_avxvnni(), has_avx512vnni(), has_dotprod(), has_i8mm();  // cpu.cpp

// What a processor computes; every entry is by the number of the format.
struct Isa {
  const char* name;
  bool (*runs)();
  void (*quantize[FORMAT_COUNT])(const Product&, int64_t row, int64_t first_block,
                                 int64_t end);
  void (*multiply[FORMAT_COUNT])(const Product&, int64_t first_group, int64_t end);
  void (*attend)(const Attention&, const Attention::Part&, float* scratch);
  void (*recur)(const Recurrence&, int64_t head, float* scratch);  // [key][COLUMNS]
  void (*convolve)(const Convolution&, int64_t row);
};

extern const Isa PORTABLE, AVX2, AVXVNNI, AVX512VNNI, DOTPROD, I8MM;

// All of this machine's kind, the fastest first and PORTABLE last, then null.
constexpr const Isa* ISAS[] = {
#if defined(__x86_64__)
    &AVX512VNNI, &AVXVNNI, &AVX2,
#elif defined(__aarch64__)
    &I8MM, &DOTPROD,
#endif
    &PORTABLE, nullptr};

}  // namespace jetdraft
