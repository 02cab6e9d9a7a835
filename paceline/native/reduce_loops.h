/* The loops of reduce.c, included once for each instruction set.

   The includer defines:
   ISA(name)  the name of this copy of a function
   TARGET     the attribute that lets the compiler use the instructions, or nothing
   TARGET_FMA the same with fused multiplications. Only loops that ask for them have it: gcc 12 fuses
              complex products even under -ffp-contract=off
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

/* bfloat16: two elements lie in a word. Widening is a shift or a mask if the first elements of all
   words come first, then the second ones; no lane moves. The last word may lack its second half. */
TARGET static void ISA(widen_bf16)(float *restrict to, const uint16_t *restrict from, int64_t n) {
    const int64_t words = n / 2, half = (n + 1) / 2;
    VECTORIZE for (int64_t i = 0; i < words; i++) {
        const uint32_t word = read_word(from + 2 * i);
        to[i] = float_of_bits(word << 16);
        to[half + i] = float_of_bits(word & 0xffff0000u);
    }
    if (n & 1) to[words] = float_of_bits((uint32_t)from[n - 1] << 16), to[half + words] = 0;
}

TARGET_FMA static void ISA(add_widened_bf16)(float *restrict to, const uint16_t *restrict from,
                                             float factor, int64_t n) {
    const int64_t words = n / 2, half = (n + 1) / 2;
    VECTORIZE for (int64_t i = 0; i < words; i++) {
        const uint32_t word = read_word(from + 2 * i);
        to[i] = FUSE(float, float_of_bits(word << 16), factor, to[i]);
        to[half + i] = FUSE(float, float_of_bits(word & 0xffff0000u), factor, to[half + i]);
    }
    if (n & 1)
        to[words] = FUSE(float, float_of_bits((uint32_t)from[n - 1] << 16), factor, to[words]);
}

TARGET static void ISA(narrow_bf16)(uint16_t *restrict to, const float *restrict from, float factor,
                                    int64_t n) {
    const int64_t words = n / 2, half = (n + 1) / 2;
    for (int64_t i = 0; i < words; i++)
        write_word(to + 2 * i, round_to_bf16(from[i] * factor) >> 16 |
                                   (round_to_bf16(from[half + i] * factor) & 0xffff0000u));
    if (n & 1) to[n - 1] = (uint16_t)(round_to_bf16(from[words] * factor) >> 16);
}

/* float16 keeps its order. For an odd n, one more float is written. */
#if HAS_F16C
#define LOAD_F16(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define STORE_F16(to, x)                                                                          \
    _mm_storeu_si128((__m128i *)(to), _mm256_cvtps_ph((x), _MM_FROUND_TO_NEAREST_INT))
#endif

TARGET static void ISA(widen_f16)(float *restrict to, const uint16_t *restrict from, int64_t n) {
    int64_t i = 0;
#if HAS_F16C
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, LOAD_F16(from + i));
#endif
    for (; i < n; i++) to[i] = float_of_half(from[i]);
    if (n & 1) to[n] = 0;
}

TARGET_FMA static void ISA(add_widened_f16)(float *restrict to, const uint16_t *restrict from,
                                            float factor, int64_t n) {
    int64_t i = 0;
#if HAS_F16C
    const __m256 factors = _mm256_set1_ps(factor);
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(
            to + i, _mm256_fmadd_ps(LOAD_F16(from + i), factors, _mm256_loadu_ps(to + i)));
#endif
    for (; i < n; i++) to[i] = FUSE(float, float_of_half(from[i]), factor, to[i]);
}

TARGET static void ISA(narrow_f16)(uint16_t *restrict to, const float *restrict from, float factor,
                                   int64_t n) {
    int64_t i = 0;
#if HAS_F16C
    const __m256 factors = _mm256_set1_ps(factor);
    for (; i + 8 <= n; i += 8)
        STORE_F16(to + i, _mm256_mul_ps(_mm256_loadu_ps(from + i), factors));
#endif
    for (; i < n; i++) to[i] = half_of_float(from[i] * factor);
}

/* Sum the elements from `at` to at + n, 16 at a time, in two registers; the last n % 16 are left.
   Returns the number of elements written. The sum is divided by `by` if that is not 0. */
#if HAS_F16C
#define SUM_HALVES(suffix, LOAD, STORE)                                                           \
    TARGET static int64_t ISA(sum_##suffix)(uint16_t *to, const uint16_t *const *parts,           \
                                            int n_parts, int64_t at, int64_t n, float by) {       \
        const __m256 divisor = _mm256_set1_ps(by);                                                \
        int64_t i = at;                                                                           \
        for (; i + 16 <= at + n; i += 16) {                                                       \
            __m256 low, high, next_low, next_high;                                                \
            LOAD(parts[0] + i, low, high);                                                        \
            for (int k = 1; k < n_parts; k++) {                                                   \
                LOAD(parts[k] + i, next_low, next_high);                                          \
                low = _mm256_add_ps(low, next_low), high = _mm256_add_ps(high, next_high);        \
            }                                                                                     \
            if (by != 0) low = _mm256_div_ps(low, divisor), high = _mm256_div_ps(high, divisor);  \
            STORE(to + i, low, high);                                                             \
        }                                                                                         \
        return i - at;                                                                            \
    }

/* As in widen_bf16, `low` has the first elements of words and `high` the second ones. */
#define LOAD_BF16_PAIR(from, low, high)                                                           \
    do {                                                                                          \
        const __m256i words = _mm256_loadu_si256((const __m256i *)(from));                        \
        low = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));                                  \
        high = _mm256_castsi256_ps(                                                               \
            _mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000u)));                        \
    } while (0)
#define STORE_BF16_PAIR(to, low, high)                                                            \
    _mm256_storeu_si256((__m256i *)(to),                                                          \
                        _mm256_blend_epi16(_mm256_srli_epi32(ISA(round_bf16)(low), 16),           \
                                           ISA(round_bf16)(high), 0xaa))
#define LOAD_F16_PAIR(from, low, high) (low = LOAD_F16(from), high = LOAD_F16((from) + 8))
#define STORE_F16_PAIR(to, low, high) (STORE_F16(to, low), STORE_F16((to) + 8, high))

/* round_to_bf16 for eight floats. */
TARGET static inline __m256i ISA(round_bf16)(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    return _mm256_castps_si256(_mm256_blendv_ps(
        _mm256_castsi256_ps(_mm256_add_epi32(bits, bias)),
        _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

SUM_HALVES(bf16, LOAD_BF16_PAIR, STORE_BF16_PAIR)
SUM_HALVES(f16, LOAD_F16_PAIR, STORE_F16_PAIR)
#define SUM_LOOP(suffix) .sum = ISA(sum_##suffix),
#else
#define SUM_LOOP(suffix)
#endif

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

#define HALF_LOOPS(suffix)                                                                        \
    SUM_LOOP(suffix)                                                                              \
    .widen = ISA(widen_##suffix), .add_widened = ISA(add_widened_##suffix),                       \
    .narrow = ISA(narrow_##suffix)

static const struct loops ISA(loops)[] = {
    [PL_F32] = {FLOAT_LOOPS(f32, 4)},
    [PL_F64] = {FLOAT_LOOPS(f64, 8)},
    [PL_F16] = {FLOAT_LOOPS(f32, 2), HALF_LOOPS(f16)},
    [PL_BF16] = {FLOAT_LOOPS(f32, 2), HALF_LOOPS(bf16)},
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

#undef FOLD
#undef FLOAT_MIN
#undef FLOAT_MAX
#undef FLOAT_FOLDS
#undef INTEGER_FOLDS
#undef COMPLEX_FOLD
#undef COMPLEX_FOLDS
#undef SCALES
#undef COMPLEX_MEANS
#undef INTEGER_LOOPS
#undef FLOAT_LOOPS
#undef COMPLEX_LOOPS
#undef HALF_LOOPS
#undef ISA
#undef TARGET
#undef TARGET_FMA
#undef HAS_F16C
#undef SUM_LOOP
#undef FUSE
