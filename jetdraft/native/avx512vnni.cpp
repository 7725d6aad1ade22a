// AVX-512 VNNI: VPDPBUSD on registers of 512 bits.
#include "avx512.h"

namespace jetdraft {

extern const Isa AVX512VNNI = isa<Avx512>("avx512vnni", has_avx512vnni);

}  // namespace jetdraft
