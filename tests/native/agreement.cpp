// Compares every processor's products that run here with the portable ones, bit by bit:
// all formats, whole and cut blocks and groups, passes of 1 to 19 rows and each row by
// itself. Prints a line for each processor; ends with 1 if two numbers differ.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../../jetdraft/native/format.h"

using namespace jetdraft;

namespace {

std::mt19937 random_bits(0);

struct Matrix {
  int format;
  int64_t columns, numbers, padded;
  std::vector<uint8_t> integers, scales;

  Matrix(int number, int64_t n, int64_t k) : format(number), columns(n), numbers(k) {
    const Format& f = FORMATS[number];
    const int64_t unit = has_supers(f.scales) ? SUPER : BLOCK;
    const int64_t groups = (n + GROUP - 1) / GROUP, step = scale_bytes(f.scales);
    padded = round_up(k, unit);
    integers.resize(size_t(groups * padded / BLOCK * block_bytes(f.bits)));
    scales.resize(size_t(groups * padded / unit * step));
    for (auto& byte : integers) byte = uint8_t(random_bits());
    for (auto& byte : scales) byte = uint8_t(random_bits());
    // Halves must be finite: they come first in each unit.
    const int halves = f.scales == Scales::HALF || f.scales == Scales::SUPER_HALVES ? 16 : 32;
    for (size_t unit_at = 0; unit_at < scales.size(); unit_at += size_t(step))
      for (int i = 0; i < halves; i++) {
        auto& high = scales[unit_at + size_t(2 * i + 1)];
        high = uint8_t((high & 0x83) | (i % 5 == 0 ? 0 : 0x28));  // some subnormal
      }
  }

  std::vector<float> times(const Isa& isa, const std::vector<float>& x) const {
    const int64_t rows = int64_t(x.size()) / numbers, blocks = rows * padded / BLOCK;
    std::vector<float> y(size_t(rows * columns)), scale_of(size_t(blocks), 0), total(scale_of);
    std::vector<int8_t> q(size_t(rows * padded));
    std::vector<int32_t> corrections(size_t(2 * blocks));
    const Product p{columns, numbers, padded, rows, integers.data(), scales.data(),
                    x.data(), y.data(),
                    {q.data(), scale_of.data(), total.data(), corrections.data()}};
    for (int64_t row = 0; row < rows; row++) isa.quantize[format](p, row);
    isa.multiply[format](p, 0, (columns + GROUP - 1) / GROUP);
    return y;
  }
};

std::vector<float> random_rows(int64_t rows, int64_t numbers) {
  std::vector<float> x(size_t(rows * numbers));
  std::normal_distribution<float> normal;
  for (auto& number : x) number = normal(random_bits);
  for (size_t i = 0; i < x.size(); i += 97) x[i] *= 1000;
  for (int64_t i = 0; i < numbers && rows > 2; i++) x[size_t(2 * numbers + i)] = 0;
  return x;
}

bool equal(const float* a, const float* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

}  // namespace

int main() {
  bool agrees = true;
  for (const Isa* const* isa = ISAS; *isa != nullptr; isa++) {
    if (!(*isa)->runs()) continue;
    int products = 0, wrong = 0;
    random_bits.seed(0);
    for (int format = 0; format < FORMAT_COUNT; format++)
      for (auto [n, k] : {std::pair{16, 256}, {48, 512}, {7, 40}, {33, 1000}, {160, 31}}) {
        const Matrix matrix(format, n, k);
        for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 16, 19}) {
          const auto x = random_rows(rows, k);
          const auto y = matrix.times(**isa, x);
          products++;
          bool same = equal(y.data(), matrix.times(PORTABLE, x).data(), y.size());
          for (int64_t row = 0; row < rows; row++) {
            const std::vector<float> one(x.begin() + row * k, x.begin() + (row + 1) * k);
            same &= equal(&y[size_t(row * n)], matrix.times(**isa, one).data(), size_t(n));
          }
          wrong += !same;
        }
      }
    std::printf("%s: %d products, %d differ\n", (*isa)->name, products, wrong);
    agrees &= wrong == 0;
  }
  return !agrees;
}
