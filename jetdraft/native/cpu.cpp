// What a processor and its system can run: compiled without the instructions that it
// asks for.
#include "format.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace jetdraft {
namespace {

// The compiler's own question, __builtin_cpu_supports, needs the compiler's runtime.

enum Register { EAX, EBX, ECX, EDX };

bool cpu_has(unsigned leaf, unsigned subleaf, Register place, unsigned bit) {
  unsigned registers[4] = {};
  if (!__get_cpuid_count(leaf, subleaf, &registers[EAX], &registers[EBX],
                         &registers[ECX], &registers[EDX]))
    return false;
  return registers[place] >> bit & 1;
}

// Whether the system saves the registers with these bits of XCR0 for a process.
bool system_saves(unsigned bits) {
  if (!cpu_has(1, 0, ECX, 27)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & bits) == bits;
}

}  // namespace

bool has_avx2() {
  const bool fma = cpu_has(1, 0, ECX, 12), f16c = cpu_has(1, 0, ECX, 29);
  return cpu_has(7, 0, EBX, 5) && fma && f16c && system_saves(0x06);
}

bool has_avxvnni() { return has_avx2() && cpu_has(7, 1, EAX, 4); }

bool has_avx512vnni() {
  for (unsigned bit = 16; bit < 32; bit++)
    if (bit == 16 || bit == 17 || bit > 29)  // F, DQ, BW, VL
      if (!cpu_has(7, 0, EBX, bit)) return false;
  return has_avx2() && cpu_has(7, 0, ECX, 11) && system_saves(0xe6);
}

}  // namespace jetdraft

#elif defined(__aarch64__)
#include <sys/auxv.h>

namespace jetdraft {

bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }  // ASIMDDP

bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }

}  // namespace jetdraft
#endif
