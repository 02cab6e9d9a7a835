/* Reductions, scaled copies and plain copies: cut into blocks that stay in the first-level cache.

   one block of 2 KiB:   parts[0]  parts[1]  parts[2]  ...  parts[n-1]
                              \      /          |               |
                    block:    fold   ->  fold   ->   ...  ->  fold -> divide (mean) -> every out

   Halves are widened to float32 on their way in, and narrowed once on their way out. The last fold
   writes to outs[0] itself if nothing is left to do. All parts of a block are read before an out
   is written: an out may be a part. */
#include "reduce.h"

#include <string.h>

#if defined(__x86_64__)
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
typedef void narrow_loop(uint16_t *restrict to, const float *restrict from, int64_t n);

/* The loops of a dtype; NULL if it has no such operation. Those of halves work on float32. */
struct loops {
    fold_loop *fold[PL_MAX + 1];
    scale_loop *scale, *divide, *scale_add;
    widen_loop *widen;
    narrow_loop *narrow;
};

/* A complex element is two lanes. */
static const struct {
    uint8_t lane_bytes, lanes;
} layouts[] = {
    [PL_F32] = {4, 1}, [PL_F64] = {8, 1}, [PL_F16] = {2, 1}, [PL_BF16] = {2, 1},
    [PL_I8] = {1, 1},  [PL_I16] = {2, 1}, [PL_I32] = {4, 1}, [PL_I64] = {8, 1},
    [PL_U8] = {1, 1},  [PL_BOOL] = {1, 1}, [PL_C64] = {4, 2}, [PL_C128] = {8, 2},
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
/* Without branches, so that loops vectorize. The method is that of the FP16 library (Dukhan, 2017):
   the exponent is moved by a multiplication, and subnormals by a subtraction of 0.5. */
static inline float float_of_half(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16, magnitude = bits << 1;
    const float normal = float_of_bits((magnitude >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float subnormal = float_of_bits((magnitude >> 17) | (126u << 23)) - 0.5f;
    return float_of_bits((bits & 0x80000000u) |
                         bits_of_float(magnitude < (1u << 27) ? subnormal : normal));
}

/* Adding a power of two of the right exponent makes the processor round where float16 ends. */
static inline uint16_t half_of_float(float value) {
    const uint32_t bits = bits_of_float(value), magnitude = bits << 1;
    const float size = float_of_bits(magnitude >> 1);
    const uint32_t exponent = magnitude & 0xff000000u;
    const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
    const uint32_t rounded = bits_of_float(float_of_bits((bias >> 1) + 0x07800000u) +
                                           size * 0x1.0p+112f * 0x1.0p-110f);
    const uint32_t narrow = (rounded >> 13 & 0x7c00u) + (rounded & 0x0fffu);
    return (uint16_t)((bits >> 16 & 0x8000u) | (magnitude > 0xff000000u ? 0x7e00u : narrow));
}
#endif

#define ISA(name) name##_portable
#define TARGET
#define HAS_F16C 0
#if defined(__aarch64__)
#define FUSE(T, a, b, c) (sizeof(T) == 4 ? (T)__builtin_fmaf((float)(a), (float)(b), (float)(c)) \
                                         : (T)__builtin_fma((a), (b), (c)))
#else
#define FUSE(T, a, b, c) ((a) * (b) + (c))
#endif
#include "reduce_loops.h"

#if defined(__x86_64__)
#define ISA(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define HAS_F16C 1
#define FUSE(T, a, b, c) (sizeof(T) == 4 ? (T)__builtin_fmaf((float)(a), (float)(b), (float)(c)) \
                                         : (T)__builtin_fma((a), (b), (c)))
#include "reduce_loops.h"
#endif

/* The loops of a dtype, in the best instructions of this processor. NULL for an unknown dtype. */
static const struct loops *pick_loops(int dtype) {
    if (dtype < PL_F32 || dtype > PL_C128) return NULL;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return &loops_avx2[dtype];
#endif
    return &loops_portable[dtype];
}

/* Room for one block, of lanes of any type. */
typedef union {
    float f32[BLOCK_BYTES / 4];
    double f64[BLOCK_BYTES / 8];
    char bytes[BLOCK_BYTES];
} block_t;

/* Return the lanes of a part: where they are, or widened or weighted in `block`. */
static const void *read_part(block_t *block, const char *from, const double *weight,
                             const struct loops *loops, int64_t lanes) {
    const void *x = from;
    if (loops->widen) {
        loops->widen(block->f32, x, lanes);
        x = block->f32;
    }
    if (weight && *weight != 1.0) {
        loops->scale(block->bytes, x, *weight, lanes);
        x = block->bytes;
    }
    return x;
}

/* Reduce one block, and store it to every out. `at` is its offset in bytes. */
static void reduce_block(void *const *outs, int n_outs, const void *const *parts, int n_parts,
                         const double *weights, int64_t at, int64_t lanes, int lane_bytes,
                         const struct loops *loops, int op) {
    block_t total, first_block, next_block;
    char *out = (char *)outs[0] + at;
    scale_loop *finish = NULL;
    double finish_by = n_parts;
    if (op == PL_MEAN) {
        /* For a power of two the reciprocal is exact, and a product is faster than a quotient. */
        const int is_power = (n_parts & (n_parts - 1)) == 0;
        finish = is_power ? loops->scale : loops->divide;
        finish_by = is_power ? 1.0 / n_parts : n_parts;
    }
    const void *sum = NULL;
    for (int k = 0; k < n_parts; k++) {
        const double *weight = weights ? &weights[k] : NULL;
        if (weight && *weight == 0.0) continue;
        const void *x = read_part(sum ? &next_block : &first_block, (const char *)parts[k] + at,
                                  weight, loops, lanes);
        if (!sum) {
            sum = x;
            continue;
        }
        void *to = k == n_parts - 1 && !loops->narrow ? (void *)out : total.bytes;
        loops->fold[op](to, sum, x, lanes);
        sum = to;
    }
    if (!sum) sum = memset(total.bytes, 0, sizeof total);
    if (finish) {
        void *to = loops->narrow ? total.bytes : (void *)out;
        finish(to, sum, finish_by, lanes);
        sum = to;
    }
    if (loops->narrow)
        loops->narrow((uint16_t *)(void *)out, sum, lanes);
    else
        pl_copy(out, sum, lanes * lane_bytes);
    for (int j = 1; j < n_outs; j++) pl_copy((char *)outs[j] + at, out, lanes * lane_bytes);
}

int pl_reduce(void *const *outs, int n_outs, const void *const *parts, int n_parts,
              const double *weights, int64_t count, int dtype, int op) {
    const struct loops *loops = pick_loops(dtype);
    if (!loops || op < PL_SUM || op > PL_MAX || !loops->fold[op] || n_outs < 1 || n_parts < 1)
        return -1;
    /* Only floating dtypes have a scale_add. */
    if (weights && (!loops->scale_add || (op != PL_SUM && op != PL_MEAN))) return -1;
    const int lane_bytes = layouts[dtype].lane_bytes;
    const int64_t lanes = count * layouts[dtype].lanes;
    const int64_t step = BLOCK_BYTES / (loops->widen ? 4 : lane_bytes);
    for (int64_t i = 0; i < lanes; i += step)
        reduce_block(outs, n_outs, parts, n_parts, weights, i * lane_bytes,
                     lanes - i < step ? lanes - i : step, lane_bytes, loops, op);
    return 0;
}

int pl_scale_copy(void *out, const void *x, int64_t count, int dtype, double factor) {
    const struct loops *loops = pick_loops(dtype);
    if (!loops || !loops->scale_add) return -1;
    const int lane_bytes = layouts[dtype].lane_bytes;
    if (factor == 0.0) {
        if (count > 0) memset(out, 0, (size_t)(count * lane_bytes));
    } else if (factor == 1.0) {
        pl_copy(out, x, count * lane_bytes);
    } else if (!loops->widen) {
        loops->scale(out, x, factor, count);
    } else {
        float block[BLOCK_BYTES / 4];
        const int64_t step = BLOCK_BYTES / 4;
        for (int64_t i = 0; i < count; i += step) {
            const int64_t n = count - i < step ? count - i : step;
            loops->widen(block, (const uint16_t *)x + i, n);
            loops->scale(block, block, factor, n);
            loops->narrow((uint16_t *)out + i, block, n);
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
    float narrow_factor = (float)factor;
    loops->narrow(&half, &narrow_factor, 1);
    loops->widen(&narrow_factor, &half, 1);
    float total[BLOCK_BYTES / 4], addend[BLOCK_BYTES / 4];
    const int64_t step = BLOCK_BYTES / 4;
    for (int64_t i = 0; i < count; i += step) {
        const int64_t n = count - i < step ? count - i : step;
        loops->widen(total, (const uint16_t *)out + i, n);
        loops->widen(addend, (const uint16_t *)x + i, n);
        loops->scale_add(total, addend, narrow_factor, n);
        loops->narrow((uint16_t *)out + i, total, n);
    }
    return 0;
}

void pl_copy(void *to, const void *from, int64_t nbytes) {
    if (to != from && nbytes > 0) memcpy(to, from, (size_t)nbytes);
}
