/* The loops of reduce.c, included once for each instruction set.

   The includer defines:
   ISA(name)      the name of this copy of a function or type
   TARGET         the attribute that lets the compiler use the instructions, or nothing
   TARGET_FMA     the same with fused multiplications. Only loops that ask for them have it: gcc 12
                  fuses complex products even under -ffp-contract=off
   FUSE(T, a, b, c)                      a * b + c, rounded once if the instruction set can
   VECTOR_BYTES   length of a vector
   FUSE_FLOATS(total, x, factor)         for vectors: total = x * factor + total, like FUSE
   WIDEN_F16(x, from)                    for vectors: x = the float16 numbers from `from` on
   NARROW_F16(words, low, high)          for vectors: words = low and high, rounded to float16

   `to` may be exactly one of the inputs, never overlap them otherwise, so each loop promises the
   compiler that its rounds are independent (VECTORIZE). n counts lanes: a complex number has 2. */

/* to = a (op) b. The last argument is the value for one element. */
#define FOLD(name, T, VALUE)                                                                      \
    TARGET static void ISA(name)(void *to_, const void *a_, const void *b_, int64_t n) {          \
        T *to = to_;                                                                              \
        const T *from_a = a_, *from_b = b_;                                                       \
        VECTORIZE for (int64_t i = 0; i < n; i++) {                                               \
            const T a = from_a[i], b = from_b[i];                                                 \
            to[i] = VALUE;                                                                        \
        }                                                                                         \
    }

/* Comparisons with nan are false: the second line takes b if b is nan, the first a if a is nan. */
#define FLOAT_MIN (a != a ? a : a < b ? a : b)
#define FLOAT_MAX (a != a ? a : a > b ? a : b)

#define FLOAT_FOLDS(suffix, T)                                                                    \
    FOLD(add_##suffix, T, a + b)                                                                  \
    FOLD(multiply_##suffix, T, a *b)                                                              \
    FOLD(min_##suffix, T, FLOAT_MIN)                                                              \
    FOLD(max_##suffix, T, FLOAT_MAX)

/* Unsigned arithmetic of type U wraps; overflow of signed ones and promoted shorts is undefined. */
#define INTEGER_FOLDS(suffix, T, U)                                                               \
    FOLD(add_##suffix, T, (T)((U)a + (U)b))                                                       \
    FOLD(multiply_##suffix, T, (T)((U)a * (U)b))                                                  \
    FOLD(min_##suffix, T, a < b ? a : b)                                                          \
    FOLD(max_##suffix, T, a > b ? a : b)                                                          \
    FOLD(and_##suffix, T, (T)(a & b))                                                             \
    FOLD(or_##suffix, T, (T)(a | b))                                                              \
    FOLD(xor_##suffix, T, (T)(a ^ b))

FLOAT_FOLDS(f32, float)
FLOAT_FOLDS(f64, double)
INTEGER_FOLDS(i8, int8_t, uint32_t)
INTEGER_FOLDS(i16, int16_t, uint32_t)
INTEGER_FOLDS(i32, int32_t, uint32_t)
INTEGER_FOLDS(i64, int64_t, uint64_t)
INTEGER_FOLDS(u8, uint8_t, uint32_t)

/* Real and imaginary parts are lanes next to each other; n counts lanes. */
#define COMPLEX_FOLD(name, T, REAL, IMAGINARY)                                                    \
    TARGET static void ISA(name)(void *to_, const void *a_, const void *b_, int64_t n) {          \
        T *to = to_;                                                                              \
        const T *from_a = a_, *from_b = b_;                                                       \
        VECTORIZE for (int64_t i = 0; i < n / 2; i++) {                                           \
            const T a = from_a[2 * i], b = from_a[2 * i + 1];                                     \
            const T c = from_b[2 * i], d = from_b[2 * i + 1];                                     \
            to[2 * i] = REAL;                                                                     \
            to[2 * i + 1] = IMAGINARY;                                                            \
        }                                                                                         \
    }

/* Torch adds b * (1 + 0i): an infinite b becomes nan. */
#define COMPLEX_FOLDS(suffix, T)                                                                  \
    COMPLEX_FOLD(add_##suffix, T, a + (c - d * (T)0), b + (c * (T)0 + d))                         \
    COMPLEX_FOLD(multiply_##suffix, T, a *c - b * d, a *d + b * c)

COMPLEX_FOLDS(c64, float)
COMPLEX_FOLDS(c128, double)

/* to = x * factor; to = x / divisor; to = to + x * factor. */
#define SCALES(suffix, T)                                                                         \
    TARGET static void ISA(scale_##suffix)(void *to_, const void *x_, double factor_, int64_t n) { \
        T *to = to_;                                                                              \
        const T *x = x_, factor = (T)factor_;                                                     \
        VECTORIZE for (int64_t i = 0; i < n; i++) to[i] = x[i] * factor;                          \
    }                                                                                             \
    TARGET static void ISA(divide_##suffix)(void *to_, const void *x_, double by_, int64_t n) {   \
        T *to = to_;                                                                              \
        const T *x = x_, by = (T)by_;                                                             \
        VECTORIZE for (int64_t i = 0; i < n; i++) to[i] = x[i] / by;                              \
    }                                                                                             \
    TARGET_FMA static void ISA(scale_add_##suffix)(void *to_, const void *x_, double factor_,     \
                                                   int64_t n) {                                   \
        T *to = to_;                                                                              \
        const T *x = x_, factor = (T)factor_;                                                     \
        VECTORIZE for (int64_t i = 0; i < n; i++) to[i] = FUSE(T, x[i], factor, to[i]);           \
    }

SCALES(f32, float)
SCALES(f64, double)

/* A complex number times 1/n + 0i, or divided by n + 0i as torch does it: by Smith's method, with a
   reciprocal. The products with 0 decide the signs of zeros, and turn infinities into nan. */
#define COMPLEX_MEANS(suffix, T)                                                                  \
    TARGET static void ISA(scale_##suffix)(void *to_, const void *x_, double factor_, int64_t n) { \
        T *to = to_;                                                                              \
        const T *x = x_, c = (T)factor_, d = 0;                                                   \
        VECTORIZE for (int64_t i = 0; i < n / 2; i++) {                                           \
            const T a = x[2 * i], b = x[2 * i + 1];                                               \
            to[2 * i] = a * c - b * d;                                                            \
            to[2 * i + 1] = a * d + b * c;                                                        \
        }                                                                                         \
    }                                                                                             \
    TARGET static void ISA(divide_##suffix)(void *to_, const void *x_, double by_, int64_t n) {   \
        T *to = to_;                                                                              \
        const T *x = x_, reciprocal = (T)1 / (T)by_, ratio = 0;                                   \
        VECTORIZE for (int64_t i = 0; i < n / 2; i++) {                                           \
            const T a = x[2 * i], b = x[2 * i + 1];                                               \
            to[2 * i] = (a + b * ratio) * reciprocal;                                             \
            to[2 * i + 1] = (b - a * ratio) * reciprocal;                                         \
        }                                                                                         \
    }

COMPLEX_MEANS(c64, float)
COMPLEX_MEANS(c128, double)

/* ---- halves: two vectors of float32 at a time, which are two vectors of bytes of memory each

   bfloat16: two elements lie in a word. `low` has the first elements of the words and `high` the
   second ones, so that a shift or a mask converts them: no lane moves. float16 keeps its order. */
typedef float ISA(floats) __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ISA(ints) __attribute__((vector_size(VECTOR_BYTES)));
enum { ISA(LANES) = VECTOR_BYTES / 4, ISA(UNIT) = VECTOR_BYTES / 2 };

TARGET INLINE void ISA(round_to_bf16)(ISA(floats) *x) {
    const ISA(ints) bits = (ISA(ints))*x, nan = *x != *x;
    /* Half of the last place, less one if the last place is even: ties go to even. */
    *x = (ISA(floats))((nan & 0x7fc00000) | (~nan & (bits + 0x7fff + (bits >> 16 & 1))));
}

TARGET_FMA INLINE void ISA(fold_floats)(ISA(floats) *total, const ISA(floats) *x, int op,
                                        float factor) {
    const ISA(floats) a = *total, b = *x;
    const ISA(ints) takes_a = (a != a) | (op == PL_MIN ? a < b : a > b);
    if (op == PL_SUM)
        *total = a + b;
    else if (op == PL_PRODUCT)
        *total = a * b;
    else if (op == SCALE_ADD)
        FUSE_FLOATS(*total, b, factor);
    else
        *total = (ISA(floats))((takes_a & (ISA(ints))a) | (~takes_a & (ISA(ints))b));
}

/* Load n elements, at most a unit. */
TARGET INLINE void ISA(load_halves)(ISA(floats) *low, ISA(floats) *high, const uint16_t *from,
                                    size_t n, int is_bf16) {
    uint16_t tail[ISA(UNIT)] = {0};
    if (n < ISA(UNIT)) from = memcpy(tail, from, n * sizeof *tail);
    if (is_bf16) {
        ISA(ints) words;
        memcpy(&words, from, sizeof words);
        *low = (ISA(floats))(words << 16), *high = (ISA(floats))(words & (int32_t)0xffff0000);
    } else {
        WIDEN_F16(*low, from);
        WIDEN_F16(*high, from + ISA(LANES));
    }
}

/* Reduce the n elements from i on, at most a unit. The arguments n, op, is_bf16 and has_weights are
   constants where this is inlined, so that no branch on them is left. `factor` is that of SCALE and
   SCALE_ADD; the result is divided by `divisor` if that is not 0. */
TARGET_FMA INLINE void ISA(reduce_unit)(uint16_t *const *outs, int n_outs,
                                        const uint16_t *const *parts, int n_parts,
                                        const double *weights, float factor, float divisor,
                                        int64_t i, size_t n, int op, int is_bf16,
                                        int has_weights) {
    ISA(floats) total_low = {0}, total_high = {0}, low = {0}, high = {0};
    ISA(ints) words;
    int k = 0;
    while (has_weights && k < n_parts && weights[k] == 0.0) k++;
    if (k < n_parts) {
        ISA(load_halves)(&total_low, &total_high, parts[k] + i, n, is_bf16);
        if (has_weights) total_low *= (float)weights[k], total_high *= (float)weights[k];
    }
    for (k++; k < n_parts; k++) {
        if (has_weights && weights[k] == 0.0) continue;
        ISA(load_halves)(&low, &high, parts[k] + i, n, is_bf16);
        if (has_weights) low *= (float)weights[k], high *= (float)weights[k];
        ISA(fold_floats)(&total_low, &low, op, factor);
        ISA(fold_floats)(&total_high, &high, op, factor);
    }
    if (op == SCALE) total_low *= factor, total_high *= factor;
    if (op == PL_SUM && divisor != 0) total_low /= divisor, total_high /= divisor;
    if (is_bf16) {
        if (op != PL_MIN && op != PL_MAX) { /* these are one of the parts */
            ISA(round_to_bf16)(&total_low);
            ISA(round_to_bf16)(&total_high);
        }
        words = ((ISA(ints))total_low >> 16 & 0xffff) |
                ((ISA(ints))total_high & (int32_t)0xffff0000);
    } else {
        NARROW_F16(words, total_low, total_high);
    }
    for (k = 0; k < n_outs; k++) memcpy(outs[k] + i, &words, n * sizeof **outs);
}

#define REDUCE_ALL(op, is_bf16, has_weights)                                                      \
    do {                                                                                          \
        int64_t i = 0;                                                                            \
        for (; i + ISA(UNIT) <= count; i += ISA(UNIT))                                            \
            ISA(reduce_unit)(outs, n_outs, parts, n_parts, weights, factor, divisor, i,           \
                             ISA(UNIT), op, is_bf16, has_weights);                                \
        if (i < count)                                                                            \
            ISA(reduce_unit)(outs, n_outs, parts, n_parts, weights, factor, divisor, i,           \
                             (size_t)(count - i), op, is_bf16, has_weights);                      \
    } while (0)

#define HALVES(suffix, is_bf16)                                                                   \
    TARGET_FMA static void ISA(reduce_##suffix)(                                                  \
        uint16_t *const *outs, int n_outs, const uint16_t *const *parts, int n_parts,             \
        const double *weights, int64_t count, int op, float factor) {                             \
        const float divisor = op == PL_MEAN ? (float)n_parts : 0.0f;                              \
        if (weights)                                                                              \
            REDUCE_ALL(PL_SUM, is_bf16, 1);                                                       \
        else if (op == PL_PRODUCT)                                                                \
            REDUCE_ALL(PL_PRODUCT, is_bf16, 0);                                                   \
        else if (op == PL_MIN)                                                                    \
            REDUCE_ALL(PL_MIN, is_bf16, 0);                                                       \
        else if (op == PL_MAX)                                                                    \
            REDUCE_ALL(PL_MAX, is_bf16, 0);                                                       \
        else if (op == SCALE)                                                                     \
            REDUCE_ALL(SCALE, is_bf16, 0);                                                        \
        else if (op == SCALE_ADD)                                                                 \
            REDUCE_ALL(SCALE_ADD, is_bf16, 0);                                                    \
        else                                                                                      \
            REDUCE_ALL(PL_SUM, is_bf16, 0);                                                       \
    }

HALVES(f16, 0)
HALVES(bf16, 1)

#define INTEGER_LOOPS(suffix, bytes)                                                              \
    {                                                                                             \
        .lane_bytes = bytes, .lanes = 1,                                                          \
        .fold = {[PL_SUM] = ISA(add_##suffix),                                                    \
                 [PL_PRODUCT] = ISA(multiply_##suffix),                                           \
                 [PL_MIN] = ISA(min_##suffix),                                                    \
                 [PL_MAX] = ISA(max_##suffix),                                                    \
                 [PL_AND] = ISA(and_##suffix),                                                    \
                 [PL_OR] = ISA(or_##suffix),                                                      \
                 [PL_XOR] = ISA(xor_##suffix)}                                                    \
    }
#define FLOAT_LOOPS(suffix, bytes)                                                                \
    .lane_bytes = bytes, .lanes = 1,                                                              \
    .fold = {[PL_SUM] = ISA(add_##suffix),                                                        \
             [PL_MEAN] = ISA(add_##suffix),                                                       \
             [PL_PRODUCT] = ISA(multiply_##suffix),                                               \
             [PL_MIN] = ISA(min_##suffix),                                                        \
             [PL_MAX] = ISA(max_##suffix)},                                                       \
    .scale = ISA(scale_##suffix), .divide = ISA(divide_##suffix),                                 \
    .scale_add = ISA(scale_add_##suffix)
#define COMPLEX_LOOPS(suffix, bytes)                                                              \
    {                                                                                             \
        .lane_bytes = bytes, .lanes = 2,                                                          \
        .fold = {[PL_SUM] = ISA(add_##suffix),                                                    \
                 [PL_MEAN] = ISA(add_##suffix),                                                   \
                 [PL_PRODUCT] = ISA(multiply_##suffix)},                                          \
        .scale = ISA(scale_##suffix), .divide = ISA(divide_##suffix)                              \
    }

static const struct loops ISA(loops)[] = {
    [PL_F32] = {FLOAT_LOOPS(f32, 4)},
    [PL_F64] = {FLOAT_LOOPS(f64, 8)},
    [PL_F16] = {.lane_bytes = 2, .lanes = 1, .reduce_halves = ISA(reduce_f16)},
    [PL_BF16] = {.lane_bytes = 2, .lanes = 1, .reduce_halves = ISA(reduce_bf16)},
    [PL_I8] = INTEGER_LOOPS(i8, 1),
    [PL_I16] = INTEGER_LOOPS(i16, 2),
    [PL_I32] = INTEGER_LOOPS(i32, 4),
    [PL_I64] = INTEGER_LOOPS(i64, 8),
    [PL_U8] = INTEGER_LOOPS(u8, 1),
    [PL_BOOL] = {.lane_bytes = 1,
                 .lanes = 1,
                 .fold = {[PL_MIN] = ISA(min_u8),
                          [PL_MAX] = ISA(max_u8),
                          [PL_AND] = ISA(and_u8),
                          [PL_OR] = ISA(or_u8),
                          [PL_XOR] = ISA(xor_u8)}},
    [PL_C64] = COMPLEX_LOOPS(c64, 4),
    [PL_C128] = COMPLEX_LOOPS(c128, 8),
};

/* All other macros are the same for each instruction set. */
#undef ISA
#undef TARGET
#undef TARGET_FMA
#undef VECTOR_BYTES
#undef FUSE
#undef FUSE_FLOATS
#undef WIDEN_F16
#undef NARROW_F16
