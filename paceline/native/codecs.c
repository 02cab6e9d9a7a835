/* Codings in blocks, and selection for topk: see codecs.h.

   Each loop is written once. Its body is inlined into two functions, one of them compiled for AVX2
   (see TWICE). There are no fused multiplications: they would give other bits. */
#include "codecs.h"

#include "reduce.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Defines pl_NAME, which runs NAME in the best instructions of this processor. */
#if defined(__x86_64__) && !defined(PL_PORTABLE)
#define TWICE(result, name, parameters, arguments)                                                \
    __attribute__((target("avx2"))) static result name##_avx2 parameters {                        \
        return name arguments;                                                                    \
    }                                                                                             \
    result pl_##name parameters { return pl_has_avx2 ? name##_avx2 arguments : name arguments; }
#else
#define TWICE(result, name, parameters, arguments)                                                \
    result pl_##name parameters { return name arguments; }
#endif

enum { LANES = 8, ROW = 4 * LANES, STEP = 16, DEPTH = 4 };

/* Smaller scales are raised to this one before division: TINY of dense.py. */
static const float TINY = 1e-30f;
/* Adding it rounds a small float to an integer, ties to even, in the low bits of the sum. */
static const float SHIFT = 0x1.8p23f;

INLINE int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float magnitude_of(float value) { return __builtin_fabsf(value); }

/* Four bits, lowest first: elements below 0, and elements whose magnitude is not below `cutoff`. */
#if defined(__x86_64__)
INLINE uint32_t mark_negative(const float *x) {
    return (uint32_t)_mm_movemask_ps(_mm_cmplt_ps(_mm_loadu_ps(x), _mm_setzero_ps()));
}

INLINE uint32_t mark_large(const float *x, float cutoff) {
    const __m128 magnitudes = _mm_andnot_ps(_mm_set1_ps(-0.0f), _mm_loadu_ps(x));
    return (uint32_t)_mm_movemask_ps(_mm_cmpnlt_ps(magnitudes, _mm_set1_ps(cutoff)));
}
#else
INLINE uint32_t mark_negative(const float *x) {
    return (uint32_t)((x[0] < 0) | (x[1] < 0) << 1 | (x[2] < 0) << 2 | (x[3] < 0) << 3);
}

INLINE uint32_t mark_large(const float *x, float cutoff) {
    uint32_t marks = 0;
    for (int k = 0; k < 4; k++) marks |= (uint32_t)!(magnitude_of(x[k]) < cutoff) << k;
    return marks;
}
#endif

static int is_valid(int coding, int64_t block) {
    static const uint8_t multiple[] = {[PL_INT8] = 1, [PL_INT4] = 2, [PL_SIGN] = 8};
    return coding >= PL_INT8 && coding <= PL_SIGN && block > 0 && block % multiple[coding] == 0;
}

/* Bytes of the levels of `count` elements. */
INLINE int64_t count_bytes(int coding, int64_t count) {
    return coding == PL_INT8 ? count : coding == PL_INT4 ? (count + 1) / 2 : (count + 7) / 8;
}

/* ---- int8 and int4 */

/* The largest absolute value; nan if one is nan. As integers, the bits of absolute values are in
   the order of the values, and nan comes last. */
INLINE float find_largest(const float *x, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t bits = bits_of(x[i]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float value;
    memcpy(&value, &largest, sizeof value);
    return value;
}

/* The level of a finite element. `noise` is NULL, or points to the number for this element. */
INLINE int32_t round_level(float scaled, const float *noise, int32_t top) {
    const float value = noise ? scaled + *noise : scaled;
    const float shifted = value + SHIFT;
    int32_t level = bits_of(shifted) - bits_of(SHIFT);
    if (noise) {
        level -= shifted - SHIFT > value;
        level = level > top ? top : level;
        level = level < -top ? -top : level;
    }
    return level;
}

INLINE void write_int8(const float *restrict x, int64_t n, float inverse,
                       const float *restrict noise, uint8_t *restrict levels) {
    for (int64_t i = 0; i < n; i++)
        levels[i] = (uint8_t)round_level(x[i] * inverse, noise ? noise + i : NULL, 127);
}

/* The first half of a block goes to the low bits of its bytes, the second half to the high bits. */
INLINE void write_int4(const float *restrict x, int64_t n, float inverse,
                       const float *restrict noise, uint8_t *restrict levels) {
    const int64_t pairs = n / 2, width = n - pairs;
    for (int64_t i = 0; i < pairs; i++) {
        const int32_t low = round_level(x[i] * inverse, noise ? noise + i : NULL, 7);
        const int32_t high =
            round_level(x[width + i] * inverse, noise ? noise + width + i : NULL, 7);
        levels[i] = (uint8_t)((low + 8) | (high + 8) << 4);
    }
    if (width > pairs)
        levels[pairs] = (uint8_t)(
            round_level(x[pairs] * inverse, noise ? noise + pairs : NULL, 7) + 8);
}

/* Write the levels of a block, and return its scale. */
INLINE float write_levels(int coding, const float *x, int64_t n, const float *noise,
                          uint8_t *levels) {
    const float largest = find_largest(x, n);
    const float scale = largest * (float)(1.0 / (coding == PL_INT8 ? 127 : 7));
    const float inverse = 1.0f / (scale < TINY ? TINY : scale);
    /* A scale that isn't finite makes the block so: all levels are 0. */
    if (!(largest <= 0x1.fffffep127f)) {
        memset(levels, coding == PL_INT8 ? 0 : 0x88, (size_t)count_bytes(coding, n));
        if (coding == PL_INT4 && n & 1) levels[n / 2] = 8;
        return scale;
    }
    /* With NULL as a constant, the compiler makes a loop without noise. */
    if (coding == PL_INT8 && noise) write_int8(x, n, inverse, noise, levels);
    if (coding == PL_INT8 && !noise) write_int8(x, n, inverse, NULL, levels);
    if (coding == PL_INT4 && noise) write_int4(x, n, inverse, noise, levels);
    if (coding == PL_INT4 && !noise) write_int4(x, n, inverse, NULL, levels);
    return scale;
}

/* ---- sign */

/* Mean absolute value, added in the order of torch.mean, whatever the processor:

   32 lanes   x[0..31] + x[32..63] + ...     lane by lane; every 16 rows to the sums above, which
                                             likewise go to the next ones (Cascade, 4 of them)
    8 lanes   the 4 groups of 8 lanes; before that, group 0 gets what is left in groups of 8
    1 lane    the last n % 8 elements, then lanes 0 to 7; fewer than 8 are added as 4 lanes */
INLINE float average_magnitudes(const float *x, int64_t n) {
    float sums[DEPTH][ROW];
    if (n < LANES) {
        for (int lane = 0; lane < 4; lane++) sums[0][lane] = n < 4 ? 0 : magnitude_of(x[lane]);
        for (int64_t k = n < 4 ? 0 : 4; k < n; k++) sums[0][0] += magnitude_of(x[k]);
        return (sums[0][0] + sums[0][1] + sums[0][2] + sums[0][3]) / (float)n;
    }
    const int64_t rows = n / ROW;
    const int depth = rows < STEP ? 1 : DEPTH;
    int64_t i = 0;
    memset(sums, 0, (size_t)depth * sizeof sums[0]);
    while (i + STEP <= rows) {
        for (const int64_t stop = i + STEP; i < stop; i++)
            for (int lane = 0; lane < ROW; lane++) sums[0][lane] += magnitude_of(x[i * ROW + lane]);
        for (int level = 1; level < DEPTH; level++) {
            for (int lane = 0; lane < ROW; lane++) sums[level][lane] += sums[level - 1][lane];
            memset(sums[level - 1], 0, sizeof sums[0]);
            if (i & ((int64_t)(STEP - 1) << (4 * level))) break;
        }
    }
    for (; i < rows; i++)
        for (int lane = 0; lane < ROW; lane++) sums[0][lane] += magnitude_of(x[i * ROW + lane]);
    for (int level = 1; level < depth; level++)
        for (int lane = 0; lane < ROW; lane++) sums[0][lane] += sums[level][lane];
    for (i = rows * ROW; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[0][lane] += magnitude_of(x[i + lane]);
    for (int group = LANES; group < ROW; group += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[0][lane] += sums[0][group + lane];
    float total = 0;
    for (; i < n; i++) total += magnitude_of(x[i]);
    for (int lane = 0; lane < LANES; lane++) total += sums[0][lane];
    return total / (float)n;
}

/* Eight signs a byte, lowest bit first; a bit is set for elements below 0. */
INLINE void write_signs(const float *x, int64_t n, uint8_t *bits) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        bits[i / 8] = (uint8_t)(mark_negative(x + i) | mark_negative(x + i + 4) << 4);
    if (i < n) bits[i / 8] = 0;
    for (; i < n; i++) bits[i / 8] |= (uint8_t)((x[i] < 0) << (i % 8));
}

/* ---- messages */

INLINE int encode(int coding, const float *x, int64_t count, int64_t block, const float *noise,
                  float *scales, uint8_t *levels) {
    if (!is_valid(coding, block)) return -1;
    for (int64_t i = 0; i < count; i += block) {
        const int64_t n = count - i < block ? count - i : block;
        uint8_t *to = levels + count_bytes(coding, i);
        if (coding == PL_SIGN) {
            /* The usual length as a constant: the compiler unrolls all loops of it. */
            *scales++ = n == 64 ? average_magnitudes(x + i, 64) : average_magnitudes(x + i, n);
            write_signs(x + i, n, to);
        } else {
            *scales++ = write_levels(coding, x + i, n, noise ? noise + i : NULL, to);
        }
    }
    return 0;
}

/* Write or add the elements of a block. `adds` is a constant where this is inlined. */
INLINE void read_block(int coding, float *restrict out, int64_t n, float scale,
                       const uint8_t *restrict levels, float factor, int adds) {
#define PUT(i, level)                                                                             \
    do {                                                                                          \
        const float value = (level) * scale;                                                      \
        out[i] = adds ? out[i] + value * factor : value;                                          \
    } while (0)
    if (coding == PL_INT8) {
        for (int64_t i = 0; i < n; i++) PUT(i, (float)(int8_t)levels[i]);
    } else if (coding == PL_INT4) {
        const int64_t width = (n + 1) / 2;
        for (int64_t i = 0; i < width; i++) PUT(i, (float)((levels[i] & 15) - 8));
        for (int64_t i = 0; i < n - width; i++) PUT(width + i, (float)((levels[i] >> 4) - 8));
    } else {
        /* Vectors of the compiler, of four lanes: gcc makes none of a loop over bits. */
        typedef int32_t int_quad __attribute__((vector_size(16)));
        typedef float quad __attribute__((vector_size(16)));
        const int_quad masks[2] = {{1, 2, 4, 8}, {16, 32, 64, 128}};
        int64_t i = 0;
        for (; i + 4 <= n; i += 4) {
            const int32_t byte = levels[i / 8];
            const int_quad is_minus =
                ((int_quad){byte, byte, byte, byte} & masks[i / 4 & 1]) != 0;
            quad old, values = (quad){scale, scale, scale, scale};
            values = (quad)((int_quad)values ^ (is_minus & INT32_MIN));
            memcpy(&old, out + i, sizeof old);
            if (adds) values = old + values * factor;
            memcpy(out + i, &values, sizeof values);
        }
        for (; i < n; i++) PUT(i, levels[i / 8] >> (i % 8) & 1 ? -1.0f : 1.0f);
    }
#undef PUT
}

INLINE int read_message(int coding, float *out, int64_t count, int64_t block, const float *scales,
                        const uint8_t *levels, float factor, int adds) {
    if (!is_valid(coding, block)) return -1;
    for (int64_t i = 0; i < count; i += block) {
        const int64_t n = count - i < block ? count - i : block;
        read_block(coding, out + i, n, *scales++, levels + count_bytes(coding, i), factor, adds);
    }
    return 0;
}

INLINE int decode(int coding, float *out, int64_t count, int64_t block, const float *scales,
                  const uint8_t *levels) {
    return read_message(coding, out, count, block, scales, levels, 1.0f, 0);
}

INLINE int decode_add(int coding, float *out, int64_t count, int64_t block, const float *scales,
                      const uint8_t *levels, float factor) {
    return read_message(coding, out, count, block, scales, levels, factor, 1);
}

/* ---- topk */

INLINE int64_t find_large(const float *x, int64_t count, float cutoff, int32_t *indices,
                      int64_t capacity) {
    int64_t chosen = 0, i = 0;
    for (; i + ROW <= count; i += ROW) {
        uint32_t marks = 0;
        for (int k = 0; k < ROW; k += 4) marks |= mark_large(x + i + k, cutoff) << k;
        for (; marks; marks &= marks - 1, chosen++)
            if (chosen < capacity) indices[chosen] = (int32_t)(i + __builtin_ctz(marks));
    }
    for (; i < count; i++) {
        if (magnitude_of(x[i]) < cutoff) continue;
        if (chosen < capacity) indices[chosen] = (int32_t)i;
        chosen++;
    }
    return chosen;
}

int pl_sparse_add(float *out, int64_t count, const int32_t *indices, const float *values,
                  int64_t n_indices, float factor) {
    for (int64_t i = 0; i < n_indices; i++)
        if (indices[i] < 0 || indices[i] >= count) return -1;
    for (int64_t i = 0; i < n_indices; i++) out[indices[i]] += values[i] * factor;
    return 0;
}

TWICE(int, encode,
      (int coding, const float *x, int64_t count, int64_t block, const float *noise, float *scales,
       uint8_t *levels),
      (coding, x, count, block, noise, scales, levels))
TWICE(int, decode,
      (int coding, float *out, int64_t count, int64_t block, const float *scales,
       const uint8_t *levels),
      (coding, out, count, block, scales, levels))
TWICE(int, decode_add,
      (int coding, float *out, int64_t count, int64_t block, const float *scales,
       const uint8_t *levels, float factor),
      (coding, out, count, block, scales, levels, factor))
TWICE(int64_t, find_large,
      (const float *x, int64_t count, float cutoff, int32_t *indices, int64_t capacity),
      (x, count, cutoff, indices, capacity))
