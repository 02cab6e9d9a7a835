/* Reductions, scaled copies and plain copies: cut into blocks that stay in the first-level cache.

   one block of 2 KiB:   parts[0]  parts[1]  parts[2]  ...  parts[n-1]
                              \      /          |               |
                    block:    fold   ->  fold   ->   ...  ->  fold -> divide (mean) -> every out

   Halves are widened to float32 on their way in, and narrowed once on their way out. The last fold
   writes to outs[0] itself if nothing is left to do. All parts of a block are read before an out
   is written: an out may be a part. */
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

enum { BLOCK_BYTES = 2048 };

typedef void fold_loop(void *to, const void *a, const void *b, int64_t n);
typedef void scale_loop(void *to, const void *x, double factor, int64_t n);
typedef void widen_loop(float *restrict to, const uint16_t *restrict from, int64_t n);
typedef void add_widened_loop(float *restrict to, const uint16_t *restrict from, float factor,
                              int64_t n);
typedef int64_t sum_loop(uint16_t *to, const uint16_t *const *parts, int n_parts, int64_t at,
                         int64_t n, float by);
typedef void narrow_loop(uint16_t *restrict to, const float *restrict from, float factor, int64_t n);

/* The loops of a dtype; NULL if it has no such operation.

   Those of halves work on float32. `widen` writes an even number of floats, in any order: `narrow`
   undoes it, and multiplies by a factor on the way. `add_widened` adds halves times a factor to
   widened ones. `sum` is a faster way for sums and means, on x86 alone. */
struct loops {
    uint8_t lane_bytes, lanes; /* a complex element has two lanes */
    fold_loop *fold[PL_XOR + 1];
    scale_loop *scale, *divide, *scale_add;
    widen_loop *widen;
    add_widened_loop *add_widened;
    narrow_loop *narrow;
    sum_loop *sum;
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

static inline uint32_t read_word(const uint16_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static inline void write_word(uint16_t *to, uint32_t word) { memcpy(to, &word, sizeof word); }

/* `yes` or `no`, without a branch: gcc vectorizes no loop that has one. */
static inline uint32_t pick_bits(int condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* Round to bfloat16, in the upper half of the bits. Adds half of the last place, less one if the
   last place is even, so that ties go to even. */
static inline uint32_t round_to_bf16(float value) {
    const uint32_t bits = bits_of_float(value);
    return pick_bits(value != value, 0x7fc00000u, bits + 0x7fffu + (bits >> 16 & 1u));
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

#define ISA(name) name##_portable
#define TARGET
#define TARGET_FMA
#define HAS_F16C 0
#if defined(__aarch64__)
#define FUSE(T, a, b, c) (sizeof(T) == 4 ? (T)__builtin_fmaf((float)(a), (float)(b), (float)(c)) \
                                         : (T)__builtin_fma((a), (b), (c)))
#else
#define FUSE(T, a, b, c) ((a) * (b) + (c))
#endif
#include "reduce_loops.h"

#if defined(__x86_64__) && !defined(PL_PORTABLE)
/* gcc and clang turn __builtin_fma into one instruction, in functions whose target has it. There is
   no copy of the loops for AVX-512: measured, it gained nothing, and some processors slow down. */
#define ISA(name) name##_avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define TARGET_FMA __attribute__((target("avx2,f16c,fma")))
#define HAS_F16C 1
#define FUSE(T, a, b, c) (sizeof(T) == 4 ? (T)__builtin_fmaf((float)(a), (float)(b), (float)(c)) \
                                         : (T)__builtin_fma((a), (b), (c)))
#include "reduce_loops.h"
#endif

#if defined(__x86_64__) && !defined(PL_PORTABLE)
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

static inline int is_power_of_two(int n) { return (n & (n - 1)) == 0; }

/* Room for one block, of lanes of any type. On a cache line, so that no vector lies across two. */
typedef union {
    _Alignas(64) float f32[BLOCK_BYTES / 4];
    double f64[BLOCK_BYTES / 8];
    char bytes[BLOCK_BYTES];
} block_t;

/* Reduce one block of a dtype that is held as it is, and store it to outs[0]. */
static void reduce_plain(char *out, const void *const *parts, int n_parts, const double *weights,
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

/* Reduce one block of halves in float32, and store it to outs[0]. */
static void reduce_halves(char *out, const void *const *parts, int n_parts, const double *weights,
                          int64_t at, int64_t lanes, const struct loops *loops, int op) {
    block_t total, next;
    /* `widen` rounds the number of lanes up. */
    const int64_t widened = lanes + (lanes & 1);
    const int adds = op == PL_SUM || op == PL_MEAN;
    int is_empty = 1;
    for (int k = 0; k < n_parts; k++) {
        const uint16_t *x = (const void *)((const char *)parts[k] + at);
        const double weight = weights ? weights[k] : 1.0;
        if (weight == 0.0) continue;
        if (is_empty) {
            loops->widen(total.f32, x, lanes);
            if (weight != 1.0) loops->scale(total.f32, total.f32, weight, widened);
        } else if (adds && weight == 1.0) {
            loops->add_widened(total.f32, x, 1.0f, lanes);
        } else {
            loops->widen(next.f32, x, lanes);
            if (weight != 1.0) loops->scale(next.f32, next.f32, weight, widened);
            loops->fold[op](total.f32, total.f32, next.f32, widened);
        }
        is_empty = 0;
    }
    if (is_empty) memset(total.bytes, 0, sizeof total);
    float factor = 1.0f;
    if (op == PL_MEAN && is_power_of_two(n_parts))
        factor = 1.0f / (float)n_parts;
    else if (op == PL_MEAN)
        loops->divide(total.f32, total.f32, n_parts, widened);
    loops->narrow((void *)out, total.f32, factor, lanes);
}

int pl_reduce(void *const *outs, int n_outs, const void *const *parts, int n_parts,
              const double *weights, int64_t count, int dtype, int op) {
    const struct loops *loops = pick_loops(dtype);
    if (!loops || op < PL_SUM || op > PL_XOR || !loops->fold[op] || n_outs < 1 || n_parts < 1)
        return -1;
    /* Only floating dtypes have a scale_add. */
    if (weights && (!loops->scale_add || (op != PL_SUM && op != PL_MEAN))) return -1;
    const int lane_bytes = loops->lane_bytes;
    const int64_t lanes = count * loops->lanes;
    const int adds_halves = loops->sum && !weights && (op == PL_SUM || op == PL_MEAN);
    /* Two parts and one out need no room between passes: no blocks, so no calls for each of them. */
    const int is_one_pass =
        n_outs == 1 &&
        (adds_halves || (n_parts <= 2 && !weights && !loops->widen && op != PL_MEAN));
    const int64_t step = is_one_pass ? lanes : BLOCK_BYTES / (loops->widen ? 4 : lane_bytes);
    for (int64_t i = 0; i < lanes; i += step) {
        const int64_t n = lanes - i < step ? lanes - i : step;
        int64_t done = i;
        if (adds_halves)
            done += loops->sum(outs[0], (const uint16_t *const *)parts, n_parts, i, n,
                               op == PL_MEAN ? (float)n_parts : 0.0f);
        if (done < i + n)
            (loops->widen ? reduce_halves : reduce_plain)((char *)outs[0] + done * lane_bytes, parts,
                                                          n_parts, weights, done * lane_bytes,
                                                          i + n - done, loops, op);
        for (int j = 1; j < n_outs; j++)
            pl_copy((char *)outs[j] + i * lane_bytes, (char *)outs[0] + i * lane_bytes,
                    n * lane_bytes);
    }
    return 0;
}

int pl_scale_copy(void *out, const void *x, int64_t count, int dtype, double factor) {
    const struct loops *loops = pick_loops(dtype);
    if (!loops || !loops->scale_add) return -1;
    const int lane_bytes = loops->lane_bytes;
    if (factor == 0.0) {
        if (count > 0) memset(out, 0, (size_t)(count * lane_bytes));
    } else if (factor == 1.0) {
        pl_copy(out, x, count * lane_bytes);
    } else if (!loops->widen) {
        loops->scale(out, x, factor, count);
    } else {
        block_t block;
        const int64_t step = BLOCK_BYTES / 4;
        for (int64_t i = 0; i < count; i += step) {
            const int64_t n = count - i < step ? count - i : step;
            loops->widen(block.f32, (const uint16_t *)x + i, n);
            loops->narrow((uint16_t *)out + i, block.f32, (float)factor, n);
        }
    }
    return 0;
}

int pl_scale_add(void *out, const void *x, int64_t count, int dtype, double factor) {
    const struct loops *loops = pick_loops(dtype);
    if (!loops || !loops->scale_add) return -1;
    if (factor == 0.0) return 0;
    if (!loops->widen) {
        loops->scale_add(out, x, factor, count);
        return 0;
    }
    /* Torch rounds the factor to the dtype. */
    uint16_t half;
    float widened[2] = {(float)factor};
    loops->narrow(&half, widened, 1.0f, 1);
    loops->widen(widened, &half, 1);
    block_t total;
    const int64_t step = BLOCK_BYTES / 4;
    for (int64_t i = 0; i < count; i += step) {
        const int64_t n = count - i < step ? count - i : step;
        loops->widen(total.f32, (const uint16_t *)out + i, n);
        loops->add_widened(total.f32, (const uint16_t *)x + i, widened[0], n);
        loops->narrow((uint16_t *)out + i, total.f32, 1.0f, n);
    }
    return 0;
}

void pl_copy(void *to, const void *from, int64_t nbytes) {
    if (to != from && nbytes > 0) memcpy(to, from, (size_t)nbytes);
}
