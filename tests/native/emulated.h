// SIMDe computes AVX-512 and AVX-VNNI on a processor that has AVX2 alone. The compiler
// includes this file before a source; it adds what SIMDe 0.8 lacks or hides.
#pragma once
#include <immintrin.h>

#define __mmask64 __mmask64  // clang has this type already
#define SIMDE_ENABLE_NATIVE_ALIASES
#define SIMDE_NO_CHECK_IMMEDIATE_CONSTANT  // shifts are by arguments of functions
#include <simde/x86/avx512/setzero.h>
// Its headers need this one first.
#include <simde/x86/avx512/and.h>
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/cvt.h>
#include <simde/x86/avx512/dpbusd.h>
#include <simde/x86/avx512/fmadd.h>
#include <simde/x86/avx512/insert.h>
#include <simde/x86/avx512/loadu.h>
#include <simde/x86/avx512/mul.h>
#include <simde/x86/avx512/or.h>
#include <simde/x86/avx512/set1.h>
#include <simde/x86/avx512/slli.h>
#include <simde/x86/avx512/srli.h>
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

}  // namespace emulated

#define _mm512_cvtepu8_epi32 emulated::unsigned_bytes
#define _mm512_cvtepi8_epi32 emulated::signed_bytes
#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32
