// SIMDe computes AVX-512 and AVX-VNNI on a processor that has AVX2 alone. The compiler
// includes this file before a source; it adds what SIMDe 0.8 lacks or hides, and the
// tiles of AMX.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __mmask64 __mmask64  // clang has this type already
#define SIMDE_ENABLE_NATIVE_ALIASES
#define SIMDE_NO_CHECK_IMMEDIATE_CONSTANT  // shifts are by arguments of functions
#include <simde/x86/avx512/setzero.h>
// Its headers need this one first.
#include <simde/x86/avx512/add.h>
#include <simde/x86/avx512/and.h>
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/cvt.h>
#include <simde/x86/avx512/dpbusd.h>
#include <simde/x86/avx512/fmadd.h>
#include <simde/x86/avx512/insert.h>
#include <simde/x86/avx512/load.h>
#include <simde/x86/avx512/loadu.h>
#include <simde/x86/avx512/mul.h>
#include <simde/x86/avx512/or.h>
#include <simde/x86/avx512/set1.h>
#include <simde/x86/avx512/slli.h>
#include <simde/x86/avx512/srli.h>
#include <simde/x86/avx512/store.h>
#include <simde/x86/avx512/storeu.h>
#include <simde/x86/avx512/xor.h>

namespace emulated {

inline __m512i joined(__m256i low, __m256i high) {
  return simde_mm512_inserti64x4(simde_mm512_castsi256_si512(low), high, 1);
}
inline __m512i unsigned_bytes(__m128i a) {
  return joined(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
inline __m512i signed_bytes(__m128i a) {
  return joined(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}

struct Tile {
  int rows, bytes;
  uint8_t at[16][64];
};
inline Tile tiles[8];

inline void load_config(const void* config) {
  for (int i = 0; i < 8; i++) {
    uint16_t bytes;
    std::memcpy(&bytes, (const uint8_t*)config + 16 + 2 * i, sizeof bytes);
    tiles[i] = {((const uint8_t*)config)[48 + i], bytes, {}};
  }
}
inline void zero(int tile) { std::memset(tiles[tile].at, 0, sizeof tiles[tile].at); }
inline void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int i = 0; i < tiles[tile].rows; i++)
    std::memcpy(tiles[tile].at[i], (const uint8_t*)from + i * stride, tiles[tile].bytes);
}
inline void store(int tile, void* to, int64_t stride) {
  for (int i = 0; i < tiles[tile].rows; i++)
    std::memcpy((uint8_t*)to + i * stride, tiles[tile].at[i], tiles[tile].bytes);
}
inline void dots_of_signed_and_unsigned(int sums, int rows, int columns) {
  for (int m = 0; m < tiles[sums].rows; m++)
    for (int n = 0; n < tiles[sums].bytes; n += 4) {
      int32_t sum;
      std::memcpy(&sum, tiles[sums].at[m] + n, 4);
      for (int k = 0; k < tiles[rows].bytes; k++)
        sum += (int8_t)tiles[rows].at[m][k] * tiles[columns].at[k / 4][n + k % 4];
      std::memcpy(tiles[sums].at[m] + n, &sum, 4);
    }
}

}  // namespace emulated

#define _tile_loadconfig emulated::load_config
#undef _tile_zero
#define _tile_zero emulated::zero
#undef _tile_loadd
#define _tile_loadd emulated::load
#undef _tile_dpbsud
#define _tile_dpbsud emulated::dots_of_signed_and_unsigned
#undef _tile_stored
#define _tile_stored emulated::store
#define _tile_release() (void)0

#define _mm512_cvtepu8_epi32 emulated::unsigned_bytes
#define _mm512_cvtepi8_epi32 emulated::signed_bytes
#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32
