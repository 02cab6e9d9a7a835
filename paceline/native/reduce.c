/* Reductions, scaled copies and plain copies.

   Halves (float16, bfloat16) are widened to float32, reduced and narrowed in registers, in one pass
   over all parts. The other dtypes are cut into blocks that stay in the first-level cache:

   one block of 2 KiB:   parts[0]  parts[1]  parts[2]  ...  parts[n-1]
                              \      /          |               |
                    block:    fold   ->  fold   ->   ...  ->  fold -> divide (mean) -> every out

   The last fold writes to outs[0] itself if nothing is left to do. All parts of a block are read
   before an out is written: an out may be a part. */
#include "reduce.h"

#include <string.h>

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

enum { BLOCK_BYTES = 2048 };

/* Further operations of halves: x * factor, out + x * factor. */
enum { SCALE = PL_XOR + 1, SCALE_ADD };

typedef void fold_loop(void *to, const void *a, const void *b, int64_t n);
typedef void scale_loop(void *to, const void *x, double factor, int64_t n);
typedef void halves_loop(uint16_t *const *outs, int n_outs, const uint16_t *const *parts,
                         int n_parts, const double *weights, int64_t count, int op, float factor);

/* The loops of a dtype; NULL if it has no such operation. */
struct loops {
    uint8_t lane_bytes, lanes; /* a complex element has two lanes */
    fold_loop *fold[PL_XOR + 1];
    scale_loop *scale, *divide, *scale_add;
    halves_loop *reduce_halves; /* float16 and bfloat16 have this one alone */
};

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#if defined(__aarch64__)
static inline float float_of_half(uint16_t half) {
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return (float)value;
}

static inline uint16_t half_of_float(float value) {
    const __fp16 narrow = (__fp16)value;
    uint16_t half;
    memcpy(&half, &narrow, sizeof half);
    return half;
}
#else
/* `yes` or `no`, without a branch: gcc vectorizes no loop that has one. */
static inline uint32_t pick_bits(int condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* Without branches, so that loops vectorize. The method is that of the FP16 library (Dukhan, 2017):
   the exponent is moved by a multiplication, and subnormals by a subtraction of 0.5. */
static inline float float_of_half(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16, magnitude = bits << 1;
    const float normal = float_of_bits((magnitude >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float subnormal = float_of_bits((magnitude >> 17) | (126u << 23)) - 0.5f;
    return float_of_bits(
        (bits & 0x80000000u) |
        pick_bits(magnitude < (1u << 27), bits_of_float(subnormal), bits_of_float(normal)));
}

/* Adding a power of two of the right exponent makes the processor round where float16 ends. */
static inline uint16_t half_of_float(float value) {
    const uint32_t bits = bits_of_float(value), magnitude = bits << 1;
    const float size = float_of_bits(magnitude >> 1);
    const uint32_t exponent = magnitude & 0xff000000u;
    const uint32_t bias = pick_bits(exponent < 0x71000000u, 0x71000000u, exponent);
    const uint32_t rounded = bits_of_float(float_of_bits((bias >> 1) + 0x07800000u) +
                                           size * 0x1.0p+112f * 0x1.0p-110f);
    const uint32_t narrow = (rounded >> 13 & 0x7c00u) + (rounded & 0x0fffu);
    return (uint16_t)((bits >> 16 & 0x8000u) | pick_bits(magnitude > 0xff000000u, 0x7e00u, narrow));
}
#endif

/* Round a factor to the dtype, which is a half. For bfloat16, adds half of the last place, less one
   if the last place is even, so that ties go to even. */
static float round_factor(double factor, int dtype) {
    if (dtype == PL_F16) return float_of_half(half_of_float((float)factor));
    const uint32_t bits = bits_of_float((float)factor);
    return factor != factor ? (float)factor
                            : float_of_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

#define ISA(name) name##_portable
#define TARGET
#define TARGET_FMA
#define VECTOR_BYTES 16
#if defined(__aarch64__)
#define FUSE(T, a, b, c) (sizeof(T) == 4 ? (T)__builtin_fmaf((float)(a), (float)(b), (float)(c)) \
                                         : (T)__builtin_fma((a), (b), (c)))
#else
#define FUSE(T, a, b, c) ((a) * (b) + (c))
#endif
#define FUSE_FLOATS(total, x, factor)                                                             \
    for (int k = 0; k < 4; k++) (total)[k] = FUSE(float, (x)[k], factor, (total)[k])
#define WIDEN_F16(x, from)                                                                        \
    for (int k = 0; k < 4; k++) (x)[k] = float_of_half((from)[k])
#define NARROW_F16(words, low, high)                                                              \
    do {                                                                                          \
        uint16_t halves[8];                                                                       \
        for (int k = 0; k < 4; k++) halves[k] = half_of_float((low)[k]);                          \
        for (int k = 0; k < 4; k++) halves[4 + k] = half_of_float((high)[k]);                     \
        memcpy(&(words), halves, sizeof halves);                                                  \
    } while (0)
#include "reduce_loops.h"

#if defined(__x86_64__) && !defined(PL_PORTABLE)
/* gcc and clang turn __builtin_fma into one instruction, in functions whose target has it. There is
   no copy of the loops for AVX-512: measured, it gained nothing, and some processors slow down. */
#define ISA(name) name##_avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define TARGET_FMA __attribute__((target("avx2,f16c,fma")))
#define VECTOR_BYTES 32
#define FUSE(T, a, b, c) (sizeof(T) == 4 ? (T)__builtin_fmaf((float)(a), (float)(b), (float)(c)) \
                                         : (T)__builtin_fma((a), (b), (c)))
#define FUSE_FLOATS(total, x, factor)                                                             \
    total = (floats_avx2)_mm256_fmadd_ps((__m256)(x), _mm256_set1_ps(factor), (__m256)(total))
#define WIDEN_F16(x, from)                                                                        \
    x = (floats_avx2)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define NARROW_F16(words, low, high)                                                              \
    words = (ints_avx2)_mm256_inserti128_si256(                                                   \
        _mm256_castsi128_si256(_mm256_cvtps_ph((__m256)(low), _MM_FROUND_TO_NEAREST_INT)),        \
        _mm256_cvtps_ph((__m256)(high), _MM_FROUND_TO_NEAREST_INT), 1)
#include "reduce_loops.h"

/* Written once, when the library is loaded: asking the processor may take microseconds in a virtual
   machine. Not __builtin_cpu_supports, to which zig 0.17 always answers no. */
int pl_has_avx2;

/* Whether processor and kernel (its registers are saved) have avx2, fma and f16c. */
__attribute__((constructor)) static void ask_processor(void) {
    const unsigned wanted = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
    unsigned a, b, c, d, saved, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & wanted) != wanted) return;
    __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    if ((saved & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    pl_has_avx2 = (b & bit_AVX2) != 0;
}
#endif

/* The loops of a dtype, in the best instructions of this processor. NULL for an unknown dtype. */
static const struct loops *pick_loops(int dtype) {
    if (dtype < PL_F32 || dtype > PL_C128) return NULL;
#if defined(__x86_64__) && !defined(PL_PORTABLE)
    if (pl_has_avx2) return &loops_avx2[dtype];
#endif
    return &loops_portable[dtype];
}

static inline int is_floating(const struct loops *loops) {
    return loops->scale_add || loops->reduce_halves;
}

static inline int is_power_of_two(int n) { return (n & (n - 1)) == 0; }

/* Room for one block, of lanes of any type. On a cache line, so that no vector lies across two. */
typedef union {
    _Alignas(64) float f32[BLOCK_BYTES / 4];
    double f64[BLOCK_BYTES / 8];
    char bytes[BLOCK_BYTES];
} block_t;

/* Reduce one block of a dtype that isn't a half, and store it to outs[0]. */
static void reduce_block(char *out, const void *const *parts, int n_parts, const double *weights,
                         int64_t at, int64_t lanes, const struct loops *loops, int op) {
    block_t total, weighted[2];
    const void *sum = NULL;
    for (int k = 0; k < n_parts; k++) {
        const void *x = (const char *)parts[k] + at;
        if (weights && weights[k] == 0.0) continue;
        if (weights && weights[k] != 1.0) {
            void *product = weighted[sum != NULL].bytes;
            loops->scale(product, x, weights[k], lanes);
            x = product;
        }
        if (sum) {
            void *to = k == n_parts - 1 ? (void *)out : total.bytes;
            loops->fold[op](to, sum, x, lanes);
            x = to;
        }
        sum = x;
    }
    if (!sum) sum = memset(total.bytes, 0, sizeof total);
    if (op == PL_MEAN && is_power_of_two(n_parts))
        loops->scale(out, sum, 1.0 / n_parts, lanes);
    else if (op == PL_MEAN)
        loops->divide(out, sum, n_parts, lanes);
    else
        pl_copy(out, sum, lanes * loops->lane_bytes);
}

int pl_reduce(void *const *outs, int n_outs, const void *const *parts, int n_parts,
              const double *weights, int64_t count, int dtype, int op) {
    const struct loops *loops = pick_loops(dtype);
    if (!loops || op < PL_SUM || op > PL_XOR || n_outs < 1 || n_parts < 1) return -1;
    if (loops->reduce_halves ? op > PL_MAX : !loops->fold[op]) return -1;
    if (weights && (!is_floating(loops) || (op != PL_SUM && op != PL_MEAN))) return -1;
    if (loops->reduce_halves) {
        loops->reduce_halves((uint16_t *const *)outs, n_outs, (const uint16_t *const *)parts,
                             n_parts, weights, count, op, 1.0f);
        return 0;
    }
    const int64_t lanes = count * loops->lanes, lane_bytes = loops->lane_bytes;
    /* Two parts and one out need no room between passes, so there are no blocks. */
    const int is_one_pass = n_outs == 1 && n_parts <= 2 && !weights && op != PL_MEAN;
    const int64_t step = is_one_pass ? lanes : BLOCK_BYTES / lane_bytes;
    for (int64_t i = 0; i < lanes; i += step) {
        const int64_t at = i * lane_bytes, n = lanes - i < step ? lanes - i : step;
        char *out = (char *)outs[0] + at;
        reduce_block(out, parts, n_parts, weights, at, n, loops, op);
        for (int k = 1; k < n_outs; k++) pl_copy((char *)outs[k] + at, out, n * lane_bytes);
    }
    return 0;
}

int pl_scale_copy(void *out, const void *x, int64_t count, int dtype, double factor) {
    const struct loops *loops = pick_loops(dtype);
    if (!loops || !is_floating(loops)) return -1;
    if (factor == 0.0) {
        if (count > 0) memset(out, 0, (size_t)(count * loops->lane_bytes));
    } else if (factor == 1.0) {
        pl_copy(out, x, count * loops->lane_bytes);
    } else if (loops->reduce_halves) {
        uint16_t *to = out;
        const uint16_t *from = x;
        loops->reduce_halves(&to, 1, &from, 1, NULL, count, SCALE, (float)factor);
    } else {
        loops->scale(out, x, factor, count);
    }
    return 0;
}

int pl_scale_add(void *out, const void *x, int64_t count, int dtype, double factor) {
    const struct loops *loops = pick_loops(dtype);
    if (!loops || !is_floating(loops)) return -1;
    if (factor == 0.0) return 0;
    if (!loops->reduce_halves) {
        loops->scale_add(out, x, factor, count);
        return 0;
    }
    uint16_t *to = out;
    const uint16_t *from[2] = {out, x};
    loops->reduce_halves(&to, 1, from, 2, NULL, count, SCALE_ADD, round_factor(factor, dtype));
    return 0;
}

void pl_copy(void *to, const void *from, int64_t nbytes) {
    if (to != from && nbytes > 0) memcpy(to, from, (size_t)nbytes);
}
