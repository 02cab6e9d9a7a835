/* The loops of reduce.c, included once for each instruction set.

   The includer defines:
   ISA(name)  the name of this copy of a function
   TARGET     the attribute that lets the compiler use the instructions, or nothing
   HAS_F16C   1 if float16 is converted by x86 intrinsics
   FUSE(T, a, b, c)  a * b + c, rounded once if the instruction set can

   `to` may be exactly one of the inputs, never overlap them otherwise, so each loop promises the
   compiler that its rounds are independent (VECTORIZE). */

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

/* Unsigned arithmetic of type U wraps; signed overflow, or that of promoted shorts, is undefined. */
#define INTEGER_FOLDS(suffix, T, U)                                                               \
    FOLD(add_##suffix, T, (T)((U)a + (U)b))                                                       \
    FOLD(multiply_##suffix, T, (T)((U)a * (U)b))                                                  \
    FOLD(min_##suffix, T, a < b ? a : b)                                                          \
    FOLD(max_##suffix, T, a > b ? a : b)

FLOAT_FOLDS(f32, float)
FLOAT_FOLDS(f64, double)
INTEGER_FOLDS(i8, int8_t, uint32_t)
INTEGER_FOLDS(i16, int16_t, uint32_t)
INTEGER_FOLDS(i32, int32_t, uint32_t)
INTEGER_FOLDS(i64, int64_t, uint64_t)
INTEGER_FOLDS(u8, uint8_t, uint32_t)

/* Real and imaginary parts are lanes next to each other; n counts lanes. */
#define COMPLEX_MULTIPLY(name, T)                                                                 \
    TARGET static void ISA(name)(void *to_, const void *a_, const void *b_, int64_t n) {          \
        T *to = to_;                                                                              \
        const T *from_a = a_, *from_b = b_;                                                       \
        VECTORIZE for (int64_t i = 0; i < n / 2; i++) {                                           \
            const T a = from_a[2 * i], b = from_a[2 * i + 1];                                     \
            const T c = from_b[2 * i], d = from_b[2 * i + 1];                                     \
            to[2 * i] = a * c - b * d;                                                            \
            to[2 * i + 1] = a * d + b * c;                                                        \
        }                                                                                         \
    }

COMPLEX_MULTIPLY(multiply_c64, float)
COMPLEX_MULTIPLY(multiply_c128, double)

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
    TARGET static void ISA(scale_add_##suffix)(void *to_, const void *x_, double factor_,         \
                                               int64_t n) {                                       \
        T *to = to_;                                                                              \
        const T *x = x_, factor = (T)factor_;                                                     \
        VECTORIZE for (int64_t i = 0; i < n; i++) to[i] = FUSE(T, x[i], factor, to[i]);           \
    }

SCALES(f32, float)
SCALES(f64, double)

/* A complex number times 1/n + 0i, or divided by n + 0i as torch's vector loop does it: both are
   first divided by the larger part of the divisor. The products with 0 decide the signs of zeros,
   and turn infinities into nan. */
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
        const T *x = x_, shrink = (T)1 / (T)by_, c = (T)by_ * shrink, d = 0;                      \
        VECTORIZE for (int64_t i = 0; i < n / 2; i++) {                                           \
            const T a = x[2 * i] * shrink, b = x[2 * i + 1] * shrink;                             \
            to[2 * i] = (a * c + b * d) / (c * c);                                                \
            to[2 * i + 1] = (a * -d + b * c) / (c * c);                                           \
        }                                                                                         \
    }

COMPLEX_MEANS(c64, float)
COMPLEX_MEANS(c128, double)

TARGET static void ISA(widen_bf16)(float *restrict to, const uint16_t *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = float_of_bits((uint32_t)from[i] << 16);
}

TARGET static void ISA(narrow_bf16)(uint16_t *restrict to, const float *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = bits_of_float(from[i]);
        /* Half of the last place, less one if the last place is even: ties go to even. */
        const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

TARGET static void ISA(widen_f16)(float *restrict to, const uint16_t *restrict from, int64_t n) {
    int64_t i = 0;
#if HAS_F16C
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < n; i++) to[i] = float_of_half(from[i]);
}

TARGET static void ISA(narrow_f16)(uint16_t *restrict to, const float *restrict from, int64_t n) {
    int64_t i = 0;
#if HAS_F16C
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) to[i] = half_of_float(from[i]);
}

#define INTEGER_LOOPS(suffix)                                                                     \
    {                                                                                             \
        .fold = {[PL_SUM] = ISA(add_##suffix),                                                    \
                 [PL_PRODUCT] = ISA(multiply_##suffix),                                           \
                 [PL_MIN] = ISA(min_##suffix),                                                    \
                 [PL_MAX] = ISA(max_##suffix)}                                                    \
    }
#define FLOAT_LOOPS(suffix)                                                                       \
    .fold = {[PL_SUM] = ISA(add_##suffix),                                                        \
             [PL_MEAN] = ISA(add_##suffix),                                                       \
             [PL_PRODUCT] = ISA(multiply_##suffix),                                               \
             [PL_MIN] = ISA(min_##suffix),                                                        \
             [PL_MAX] = ISA(max_##suffix)},                                                       \
    .scale = ISA(scale_##suffix), .divide = ISA(divide_##suffix),                                 \
    .scale_add = ISA(scale_add_##suffix)
#define COMPLEX_LOOPS(suffix, part)                                                               \
    {                                                                                             \
        .fold = {[PL_SUM] = ISA(add_##part),                                                      \
                 [PL_MEAN] = ISA(add_##part),                                                     \
                 [PL_PRODUCT] = ISA(multiply_##suffix)},                                          \
        .scale = ISA(scale_##suffix), .divide = ISA(divide_##suffix)                              \
    }

static const struct loops ISA(loops)[] = {
    [PL_F32] = {FLOAT_LOOPS(f32)},
    [PL_F64] = {FLOAT_LOOPS(f64)},
    [PL_F16] = {FLOAT_LOOPS(f32), .widen = ISA(widen_f16), .narrow = ISA(narrow_f16)},
    [PL_BF16] = {FLOAT_LOOPS(f32), .widen = ISA(widen_bf16), .narrow = ISA(narrow_bf16)},
    [PL_I8] = INTEGER_LOOPS(i8),
    [PL_I16] = INTEGER_LOOPS(i16),
    [PL_I32] = INTEGER_LOOPS(i32),
    [PL_I64] = INTEGER_LOOPS(i64),
    [PL_U8] = INTEGER_LOOPS(u8),
    [PL_BOOL] = {.fold = {[PL_MIN] = ISA(min_u8), [PL_MAX] = ISA(max_u8)}},
    [PL_C64] = COMPLEX_LOOPS(c64, f32),
    [PL_C128] = COMPLEX_LOOPS(c128, f64),
};

#undef FOLD
#undef FLOAT_MIN
#undef FLOAT_MAX
#undef FLOAT_FOLDS
#undef INTEGER_FOLDS
#undef COMPLEX_MULTIPLY
#undef SCALES
#undef COMPLEX_MEANS
#undef INTEGER_LOOPS
#undef FLOAT_LOOPS
#undef COMPLEX_LOOPS
#undef ISA
#undef TARGET
#undef HAS_F16C
#undef FUSE
