/* Reductions. The loops are in reduce_loops.h; this file has two sets of them, and picks one. */
#include "reduce.h"

#if defined(__x86_64__) && !defined(PL_PORTABLE)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* The rounds of the next loop are independent, though the compiler can't see it. */
#if defined(__clang__)
#define VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define VECTORIZE _Pragma("GCC ivdep")
#endif

#define INLINE static inline __attribute__((always_inline))

/* Bytes of the real dtypes of `enum pl_dtype`, and the number of operations. */
static const int64_t item_bytes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1};
enum { OPS = PL_MAX + 1 };

/* Vectors of totals in a unit: halves are widened. */
INLINE int count_totals(int dtype) { return dtype == PL_F16 || dtype == PL_BF16 ? 4 : 2; }

INLINE int is_power_of_two(int n) { return (n & (n - 1)) == 0; }

#if defined(__aarch64__)
INLINE float float_of_half(uint16_t half) {
  __fp16 value;
  memcpy(&value, &half, sizeof value);
  return (float)value;
}

INLINE uint16_t half_of_float(float value) {
  const __fp16 narrow = (__fp16)value;
  uint16_t half;
  memcpy(&half, &narrow, sizeof half);
  return half;
}
#else
/* A float has 13 more bits behind the point than a float16, and exponents that are larger by 112.
   Only x86 processors before AVX2 convert this way. */
INLINE float float_of_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  const float subnormal = (float)rest * 0x1p-24f;
  uint32_t bits = (rest << 13) + ((rest < 0x7c00 ? 112u : 224u) << 23);
  if (rest < 0x400) memcpy(&bits, &subnormal, sizeof bits);
  bits |= sign;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Ties go to even: half of the last place is added, less one if the last place is even. */
INLINE uint16_t half_of_float(float value) {
  uint32_t bits, half;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u)
    half = 0x7e00; /* nan */
  else if (rest >= 143u << 23)
    half = 0x7c00; /* infinite */
  else if (rest >= 113u << 23)
    half = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
  else { /* subnormal: floats from 0.5 on have the last place of these numbers */
    const float shifted = __builtin_fabsf(value) + 0.5f;
    memcpy(&half, &shifted, sizeof half);
    half -= 126u << 23;
  }
  return (uint16_t)(sign | half);
}
#endif

#define ISA(name) name##_portable
#define TARGET
#define VECTOR_BYTES 16
#define WIDEN_F16(x, from)                                                                        \
  for (int lane = 0; lane < 4; lane++) (x)[lane] = float_of_half((from)[lane])
#define NARROW_F16(words, low, high)                                                              \
  do {                                                                                            \
    uint16_t halves[8];                                                                           \
    for (int lane = 0; lane < 4; lane++) halves[lane] = half_of_float((low)[lane]);               \
    for (int lane = 0; lane < 4; lane++) halves[4 + lane] = half_of_float((high)[lane]);          \
    memcpy(&(words), halves, sizeof halves);                                                      \
  } while (0)
#include "reduce_loops.h"

#if defined(__x86_64__) && !defined(PL_PORTABLE)
/* Without FMA, since gcc 12 fuses complex products even under -ffp-contract=off. Without AVX-512:
   measured, it gained nothing, and some processors slow down. */
#define ISA(name) name##_avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define VECTOR_BYTES 32
#define WIDEN_F16(x, from)                                                                        \
  x = (f32_avx2)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define NARROW_F16(words, low, high)                                                              \
  words = (u32_avx2)_mm256_inserti128_si256(                                                      \
      _mm256_castsi128_si256(_mm256_cvtps_ph((__m256)(low), _MM_FROUND_TO_NEAREST_INT)),          \
      _mm256_cvtps_ph((__m256)(high), _MM_FROUND_TO_NEAREST_INT), 1)
#include "reduce_loops.h"

/* Written once, when the library is loaded: asking the processor may take microseconds in a virtual
   machine. Not __builtin_cpu_supports, to which zig 0.17 always answers no. */
int pl_has_avx2;

/* Whether processor and kernel (its registers are saved) have avx2 and f16c. */
__attribute__((constructor)) static void ask_processor(void) {
  const unsigned wanted = bit_F16C | bit_AVX | bit_OSXSAVE;
  unsigned a, b, c, d, saved, unused;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & wanted) != wanted) return;
  __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
  if ((saved & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  pl_has_avx2 = (b & bit_AVX2) != 0;
}
#endif

int pl_reduce(void *const *outs, int n_outs, const void *const *parts, int n_parts, int64_t count,
              int dtype, int op) {
  if (n_outs < 1 || n_parts < 1 || op < PL_SUM || op > PL_MAX) return -1;
#if defined(__x86_64__) && !defined(PL_PORTABLE)
  if (pl_has_avx2) return reduce_avx2(outs, n_outs, parts, n_parts, count, dtype, op);
#endif
  return reduce_portable(outs, n_outs, parts, n_parts, count, dtype, op);
}

#define COPY_SCALED(T)                                                                            \
  for (int64_t i = 0; i < n_copies; i++) {                                                        \
    T *to = (T *)copies[i].to;                                                                    \
    const T *from = (const T *)copies[i].from, by = (T)factor;                                    \
    if (factor == 0)                                                                              \
      memset(to, 0, (size_t)copies[i].count * sizeof(T));                                         \
    else                                                                                          \
      VECTORIZE for (int64_t j = 0; j < copies[i].count; j++) to[j] = from[j] * by;               \
  }

int pl_copy_scaled(const pl_scaled_copy *copies, int64_t n_copies, int dtype, double factor) {
  if (dtype == PL_F32) {
    COPY_SCALED(float)
  } else if (dtype == PL_F64) {
    COPY_SCALED(double)
  } else {
    return -1;
  }
  return 0;
}
