/* Codings in blocks, and selection for topk: see codecs.h.

   Each loop is written once. Its body is inlined into two functions, one of them compiled for AVX2
   (see TWICE). There are no fused multiplications: they would give other bits. */
#include "codecs.h"

#include "reduce.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Defines pl_NAME, which runs NAME in the best instructions of this processor. */
#if defined(__x86_64__) && !defined(PL_PORTABLE)
#define TWICE(result, name, parameters, arguments)                                                \
  __attribute__((target("avx2"))) static result name##_avx2 parameters { return name arguments; } \
  result pl_##name parameters { return pl_has_avx2 ? name##_avx2 arguments : name arguments; }
#else
#define TWICE(result, name, parameters, arguments)                                                \
  result pl_##name parameters { return name arguments; }
#endif

enum { LANES = 8, GROUPS = 4, ROW = GROUPS * LANES, STEP = 16, DEPTH = 4 };

/* Vectors of the compiler. A loose one is in memory of any alignment. */
typedef int32_t int_quad __attribute__((vector_size(16)));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t int_octet __attribute__((vector_size(32)));
typedef float octet __attribute__((vector_size(32)));
typedef float loose_octet __attribute__((vector_size(32), aligned(4), may_alias));
typedef float loose_quad __attribute__((vector_size(16), aligned(4), may_alias));

/* Smaller scales are raised to this one before division: TINY of dense.py. */
static const float TINY = 1e-30f;
/* Adding it rounds a small float to an integer, ties to even, in the low bits of the sum. */
static const float SHIFT = 0x1.8p23f;

INLINE int32_t bits_of(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE quad load_quad(const float *x) { return *(const loose_quad *)x; }

/* Four bits, lowest first: the lanes of a comparison that are true. */
INLINE uint32_t pack_marks(int_quad marks) {
#if defined(__x86_64__)
  return (uint32_t)_mm_movemask_ps((__m128)marks);
#else
  marks &= (int_quad){1, 2, 4, 8};
  return (uint32_t)(marks[0] | marks[1] | marks[2] | marks[3]);
#endif
}

/* ---- layout of messages */

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

/* The level of element i, which is finite: rounded to the nearest, or down after adding noise. */
INLINE int32_t round_level(const float *x, int64_t i, float inverse, const float *noise, int top) {
  const float value = noise ? x[i] * inverse + noise[i] : x[i] * inverse;
  const float shifted = value + SHIFT;
  int32_t level = bits_of(shifted) - bits_of(SHIFT);
  if (noise) {
    level -= shifted - SHIFT > value;
    level = level > top ? top : level;
    level = level < -top ? -top : level;
  }
  return level;
}

/* Write the levels of a finite block. Of int4, the first half of a block goes to the low bits of
   its bytes, the second half to the high bits. */
INLINE void write_levels(int coding, const float *restrict x, int64_t n, float inverse,
                         const float *restrict noise, uint8_t *restrict levels) {
  if (coding == PL_INT8) {
    for (int64_t i = 0; i < n; i++) levels[i] = (uint8_t)round_level(x, i, inverse, noise, 127);
    return;
  }
  const int64_t pairs = n / 2, width = n - pairs;
  for (int64_t i = 0; i < pairs; i++) {
    const int32_t low = round_level(x, i, inverse, noise, 7);
    const int32_t high = round_level(x, width + i, inverse, noise, 7);
    levels[i] = (uint8_t)((low + 8) | (high + 8) << 4);
  }
  if (width > pairs) levels[pairs] = (uint8_t)(round_level(x, pairs, inverse, noise, 7) + 8);
}

/* Write the levels of a block, and return its scale. */
INLINE float encode_levels(int coding, const float *x, int64_t n, const float *noise,
                           uint8_t *levels) {
  const float largest = find_largest(x, n);
  const float scale = largest * (float)(1.0 / (coding == PL_INT8 ? 127 : 7));
  const float inverse = 1.0f / (scale < TINY ? TINY : scale);
  if (!(largest <= 0x1.fffffep127f)) { /* the scale makes all of the block infinite or nan */
    memset(levels, coding == PL_INT8 ? 0 : 0x88, (size_t)count_bytes(coding, n));
    if (coding == PL_INT4 && n & 1) levels[n / 2] = 8;
  } else if (noise) {
    write_levels(coding, x, n, inverse, noise, levels);
  } else { /* with NULL as a constant, the compiler makes a loop without noise */
    write_levels(coding, x, n, inverse, NULL, levels);
  }
  return scale;
}

/* ---- sign */

INLINE void add_magnitudes(octet *sum, const float *x) {
  *sum += (octet)((int_octet)*(const loose_octet *)x & INT32_MAX);
}

/* Mean absolute value, added in the order of torch.mean, whatever the processor:

   32 lanes   x[0..31] + x[32..63] + ...     lane by lane; every 16 rows to the sums above, which
                                             likewise go to the next ones (DEPTH of them)
    8 lanes   the 4 groups of 8 lanes; before that, group 0 gets what is left in groups of 8
    1 lane    the last n % 8 elements, then lanes 0 to 7; fewer than 8 are added as 4 lanes */
INLINE float average_magnitudes(const float *x, int64_t n) {
  octet sums[DEPTH][GROUPS];
  float total = 0;
  if (n < LANES) { /* as 4 lanes, the first of which gets the rest */
    const int64_t rest = n < 4 ? 0 : n - 4;
    for (int64_t i = 0; i < n; i++)
      total += __builtin_fabsf(x[i == 0 ? 0 : i <= rest ? i + 3 : i - rest]);
    return total / (float)n;
  }
  const int64_t rows = n / ROW;
  const int depth = rows < STEP ? 1 : DEPTH;
  for (int level = 0; level < depth; level++)
    for (int k = 0; k < GROUPS; k++) sums[level][k] = (octet){0};
  int64_t i = 0;
  while (i < rows) {
    for (int k = 0; k < GROUPS; k++) add_magnitudes(&sums[0][k], x + i * ROW + k * LANES);
    i++;
    for (int level = 1; level < depth && i % (1 << 4 * level) == 0; level++) {
      for (int k = 0; k < GROUPS; k++) {
        sums[level][k] += sums[level - 1][k];
        sums[level - 1][k] = (octet){0};
      }
    }
  }
  for (int level = 1; level < depth; level++)
    for (int k = 0; k < GROUPS; k++) sums[0][k] += sums[level][k];
  for (i = rows * ROW; i + LANES <= n; i += LANES) add_magnitudes(&sums[0][0], x + i);
  for (int k = 1; k < GROUPS; k++) sums[0][0] += sums[0][k];
  for (; i < n; i++) total += __builtin_fabsf(x[i]);
  for (int lane = 0; lane < LANES; lane++) total += sums[0][0][lane];
  return total / (float)n;
}

/* Eight signs a byte, lowest bit first; a bit is set for elements below 0. */
INLINE void write_signs(const float *x, int64_t n, uint8_t *bits) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const uint32_t low = pack_marks(load_quad(x + i) < 0.0f);
    bits[i / 8] = (uint8_t)(low | pack_marks(load_quad(x + i + 4) < 0.0f) << 4);
  }
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
      *scales++ = encode_levels(coding, x + i, n, noise ? noise + i : NULL, to);
    }
  }
  return 0;
}

/* Write or add the elements of a block. `adds` is a constant where this is inlined. */
INLINE void read_block(int coding, float *restrict out, int64_t n, float scale,
                       const uint8_t *restrict levels, float factor, int adds) {
#define PUT(i, level) out[i] = adds ? out[i] + (level) * scale * factor : (level) * scale
  if (coding == PL_INT8) {
    for (int64_t i = 0; i < n; i++) PUT(i, (float)(int8_t)levels[i]);
  } else if (coding == PL_INT4) {
    const int64_t width = (n + 1) / 2;
    for (int64_t i = 0; i < width; i++) PUT(i, (float)((levels[i] & 15) - 8));
    for (int64_t i = 0; i < n - width; i++) PUT(width + i, (float)((levels[i] >> 4) - 8));
  } else {
    const int_quad masks[2] = {{1, 2, 4, 8}, {16, 32, 64, 128}};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      const int_quad bytes = (int_quad){0} + levels[i / 8];
      const int_quad is_minus = (bytes & masks[i / 4 & 1]) != 0;
      const quad values = (quad)(((int_quad)((quad){0} + scale)) ^ (is_minus & INT32_MIN));
      *(loose_quad *)(out + i) = adds ? load_quad(out + i) + values * factor : values;
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

/* ---- topk */

INLINE int64_t find_large(const float *x, int64_t count, float cutoff, int32_t *indices,
                          int64_t capacity) {
  int64_t chosen = 0, i = 0;
  for (; i + ROW <= count; i += ROW) {
    uint32_t marks = 0;
    for (int k = 0; k < ROW; k += 4) {
      const int_quad magnitudes = (int_quad)load_quad(x + i + k) & INT32_MAX;
      marks |= pack_marks(~((quad)magnitudes < cutoff)) << k;
    }
    for (; marks; marks &= marks - 1, chosen++)
      if (chosen < capacity) indices[chosen] = (int32_t)(i + __builtin_ctz(marks));
  }
  for (; i < count; i++) {
    if (__builtin_fabsf(x[i]) < cutoff) continue;
    if (chosen < capacity) indices[chosen] = (int32_t)i;
    chosen++;
  }
  return chosen;
}

/* ---- exported functions */

#define decode(...) read_message(__VA_ARGS__, 1.0f, 0)
#define decode_add(...) read_message(__VA_ARGS__, 1)

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
