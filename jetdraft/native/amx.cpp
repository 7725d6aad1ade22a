// AMX-INT8: TDPBSUD multiplies up to 16 rows with a block of 16 columns at once.
#include "avx512.h"

namespace jetdraft {
namespace {

// How the tiles lie, in the layout that LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

enum Tile { INTEGERS, ROWS, COLUMNS };

struct Amx : Avx512 {
  static constexpr int MAX_ROWS = 16;
  static constexpr int FEWEST_ROWS = 5;  // of a tile; fewer are faster by VPDPBUSD

  template <int QUAD_COUNT, int M>
  INLINE static void begin() {
    if constexpr (M >= FEWEST_ROWS) {
      static constexpr TileConfig config = {.row_bytes = {64, 4 * QUAD_COUNT, 64},
                                            .rows = {M, M, QUAD_COUNT}};
      _tile_loadconfig(&config);
    }
  }
  static void end() { _tile_release(); }

  template <int BITS, int FIRST, int COUNT, int M>
  INLINE static void dots(const uint8_t* w, const RowBlock* read, Ints* n) {
    if constexpr (M < FEWEST_ROWS) {
      Avx512::dots<BITS, FIRST, COUNT, M>(w, read, n);
    } else {
      alignas(64) uint8_t columns[COUNT][64];
      alignas(64) int32_t sums[M][16];
#pragma unroll
      for (int t = 0; t < COUNT; t++)
        _mm512_store_si512(columns[t], unpack<BITS>(w, FIRST + t));
      _tile_zero(INTEGERS);
      _tile_loadd(ROWS, read[0].q + 4 * FIRST, sizeof(RowBlock));
      _tile_loadd(COLUMNS, columns, 64);
      _tile_dpbsud(INTEGERS, ROWS, COLUMNS);
      _tile_stored(INTEGERS, sums, 64);
#pragma unroll
      for (int m = 0; m < M; m++)
        n[m] = _mm512_add_epi32(_mm512_load_si512(sums[m]),
                                _mm512_set1_epi32(read[m].corrections[FIRST > 0]));
    }
  }
};

}  // namespace

extern const Isa AMX = isa<Amx>("amx", has_amx);

}  // namespace jetdraft
