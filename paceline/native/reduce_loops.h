/* The loops of reduce.c, included once for each instruction set.

   Real numbers are reduced in registers, in one pass over all parts, a unit of two vectors at a
   time. float16 and bfloat16 are widened to float32 when they are loaded:

   parts[0]   parts[1]  ...  parts[n-1]
       |          |               |
      load  ->  fold   -> ... -> fold -> divide (mean) -> store to every out

   All parts of a unit are read before an out is written: an out may be a part.

   The includer defines:
   ISA(name)                      the name of this copy of a function or type
   TARGET                         the attribute that allows the instructions, or nothing
   VECTOR_BYTES                   length of a vector
   WIDEN_F16(x, from)             x = the float16 numbers from `from` on
   NARROW_F16(words, low, high)   words = low and high, rounded to float16 */

#define VECTOR(name, T) typedef T ISA(name) __attribute__((vector_size(VECTOR_BYTES)))
VECTOR(f32, float);
VECTOR(f64, double);
VECTOR(i8, int8_t);
VECTOR(i16, int16_t);
VECTOR(i32, int32_t);
VECTOR(i64, int64_t);
VECTOR(u8, uint8_t);
VECTOR(u16, uint16_t);
VECTOR(u32, uint32_t);
VECTOR(u64, uint64_t);
/* A vector in memory of any type and alignment. */
typedef uint32_t ISA(loose) __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
enum { ISA(UNIT) = 2 * VECTOR_BYTES };

/* Load a unit. A word of bfloat16 has two elements: even vectors get the first elements of words
   and odd ones the second, so that a shift or a mask converts them and no lane moves. */
TARGET INLINE void ISA(load_unit)(ISA(u32) *x, const char *from, int dtype) {
  for (int k = 0; k < count_totals(dtype); k++) {
    if (dtype == PL_F16) {
      ISA(f32) wide;
      WIDEN_F16(wide, (const uint16_t *)(const void *)from + k * (VECTOR_BYTES / 4));
      x[k] = (ISA(u32))wide;
    } else if (dtype == PL_BF16) {
      const ISA(u32) words = ((const ISA(loose) *)(const void *)from)[k / 2];
      x[k] = k % 2 ? words & 0xffff0000u : words << 16;
    } else {
      x[k] = ((const ISA(loose) *)(const void *)from)[k];
    }
  }
}

/* Round floats to bfloat16 in their upper bits. Ties go to even: half of the last place is added,
   less one if the last place is even. */
TARGET INLINE void ISA(round_to_bf16)(ISA(u32) *x) {
  const ISA(u32) nan = (ISA(u32))((ISA(f32))*x != (ISA(f32))*x);
  *x = (nan & 0x7fc00000u) | (~nan & (*x + 0x7fffu + (*x >> 16 & 1u)));
}

/* total = total (op) x, in lanes of type T. Unsigned lanes U wrap; overflow of signed ones is
   undefined. Masks of comparisons have lanes of type M; comparisons with nan are false. */
#define FOLD(T, U, M)                                                                             \
  do {                                                                                            \
    const ISA(T) a = (ISA(T))*total, b = (ISA(T))*x;                                              \
    const ISA(M) takes_a = (a != a) | (op == PL_MIN ? a < b : a > b);                             \
    if (op == PL_SUM || op == PL_MEAN)                                                            \
      *total = (ISA(u32))((ISA(U))a + (ISA(U))b);                                                 \
    else if (op == PL_PRODUCT)                                                                    \
      *total = (ISA(u32))((ISA(U))a * (ISA(U))b);                                                 \
    else                                                                                          \
      *total = (ISA(u32))((takes_a & (ISA(M))a) | (~takes_a & (ISA(M))b));                        \
  } while (0)

TARGET INLINE void ISA(fold)(ISA(u32) *total, const ISA(u32) *x, int dtype, int op) {
  switch (dtype) {
    case PL_F64: FOLD(f64, f64, i64); break;
    case PL_I8: FOLD(i8, u8, i8); break;
    case PL_I16: FOLD(i16, u16, i16); break;
    case PL_I32: FOLD(i32, u32, i32); break;
    case PL_I64: FOLD(i64, u64, i64); break;
    case PL_U8: FOLD(u8, u8, i8); break;
    default: FOLD(f32, f32, i32);
  }
}

TARGET INLINE void ISA(divide)(ISA(u32) *total, int n, int dtype) {
  const int multiplies = is_power_of_two(n); /* 1/n is exact */
  if (dtype == PL_F64) {
    const ISA(f64) sum = (ISA(f64))*total;
    *total = (ISA(u32))(multiplies ? sum * (1.0 / n) : sum / (double)n);
  } else {
    const ISA(f32) sum = (ISA(f32))*total;
    *total = (ISA(u32))(multiplies ? sum * (1.0f / (float)n) : sum / (float)n);
  }
}

/* Reduce the n bytes from `at` on, at most a unit. Here and below, the arguments n, dtype and op
   are constants after inlining, so that no branch on them is left. */
TARGET INLINE void ISA(reduce_unit)(void *const *outs, int n_outs, const void *const *parts,
                                    int n_parts, int64_t at, size_t n, int dtype, int op) {
  const int totals = count_totals(dtype), is_whole = n == ISA(UNIT);
  ISA(u32) total[4], x[4];
  char tail[ISA(UNIT)] = {0};
#define PART(k)                                                                                   \
  (is_whole ? (const char *)parts[k] + at : memcpy(tail, (const char *)parts[k] + at, n))
  ISA(load_unit)(total, PART(0), dtype);
  for (int k = 1; k < n_parts; k++) {
    ISA(load_unit)(x, PART(k), dtype);
    for (int v = 0; v < totals; v++) ISA(fold)(&total[v], &x[v], dtype, op);
  }
#undef PART
  for (int v = 0; v < totals; v++) {
    if (op == PL_MEAN) ISA(divide)(&total[v], n_parts, dtype);
    /* A min or max is one of the parts. */
    if (dtype == PL_BF16 && op != PL_MIN && op != PL_MAX) ISA(round_to_bf16)(&total[v]);
  }
  for (int v = 0; v < 2; v++) {
    x[v] = total[v];
    if (dtype == PL_F16) NARROW_F16(x[v], (ISA(f32))total[2 * v], (ISA(f32))total[2 * v + 1]);
    if (dtype == PL_BF16) x[v] = total[2 * v] >> 16 | (total[2 * v + 1] & 0xffff0000u);
  }
  for (int k = 0; k < n_outs; k++) {
    ISA(loose) *out = (ISA(loose) *)(void *)((char *)outs[k] + at);
    if (is_whole)
      out[0] = x[0], out[1] = x[1];
    else
      memcpy(out, x, n);
  }
}

TARGET INLINE int ISA(reduce_real)(void *const *outs, int n_outs, const void *const *parts,
                                   int n_parts, int64_t nbytes, int dtype, int op) {
  int64_t at = 0;
  for (; at + ISA(UNIT) <= nbytes; at += ISA(UNIT))
    ISA(reduce_unit)(outs, n_outs, parts, n_parts, at, ISA(UNIT), dtype, op);
  if (at < nbytes)
    ISA(reduce_unit)(outs, n_outs, parts, n_parts, at, (size_t)(nbytes - at), dtype, op);
  return 0;
}

/* Complex numbers are pairs of lanes. They are reduced in blocks that stay in the cache. Products
   with 0 decide the signs of zeros, and turn infinities into nan: torch adds x * (1 + 0i), and
   multiplies by 1/n + 0i, or divides by n + 0i with Smith's method and a reciprocal. */
#define COMPLEX_LOOP(T, to, C, D, REAL, IMAGINARY)                                                \
  VECTORIZE for (int64_t j = 0; j < n; j += 2) {                                                  \
    const T a = sum[j], b = sum[j + 1], c = C, d = D;                                             \
    to[j] = REAL;                                                                                 \
    to[j + 1] = IMAGINARY;                                                                        \
  }
#define REDUCE_COMPLEX(name, T)                                                                   \
  TARGET static int ISA(name)(void *const *outs, int n_outs, const void *const *parts,            \
                              int n_parts, int64_t lanes, int op) {                               \
    enum { BLOCK = 2048 / sizeof(T) };                                                            \
    T total[BLOCK];                                                                               \
    const T inverse = (T)1 / (T)n_parts, zero = 0;                                                \
    for (int64_t i = 0; i < lanes; i += BLOCK) {                                                  \
      const int64_t n = lanes - i < BLOCK ? lanes - i : BLOCK;                                    \
      const T *sum = (const T *)parts[0] + i;                                                     \
      T *out = (T *)outs[0] + i;                                                                  \
      for (int k = 1; k < n_parts; k++) {                                                         \
        const T *x = (const T *)parts[k] + i;                                                     \
        T *to = k < n_parts - 1 ? total : out;                                                    \
        if (op == PL_PRODUCT)                                                                     \
          COMPLEX_LOOP(T, to, x[j], x[j + 1], a * c - b * d, a * d + b * c)                       \
        else                                                                                      \
          COMPLEX_LOOP(T, to, x[j], x[j + 1], a + (c - d * zero), b + (c * zero + d))             \
        sum = to;                                                                                 \
      }                                                                                           \
      if (op == PL_MEAN && is_power_of_two(n_parts))                                              \
        COMPLEX_LOOP(T, out, inverse, zero, a * c - b * d, a * d + b * c)                         \
      else if (op == PL_MEAN)                                                                     \
        COMPLEX_LOOP(T, out, inverse, zero, (a + b * d) * c, (b - a * d) * c)                     \
      else                                                                                        \
        pl_copy(out, sum, n * (int64_t)sizeof(T));                                                \
      for (int k = 1; k < n_outs; k++) pl_copy((T *)outs[k] + i, out, n * (int64_t)sizeof(T));    \
    }                                                                                             \
    return 0;                                                                                     \
  }

REDUCE_COMPLEX(reduce_c64, float)
REDUCE_COMPLEX(reduce_c128, double)

#define REAL_CASE(dtype, op)                                                                      \
  case (dtype) * OPS + (op):                                                                      \
    return ISA(reduce_real)(outs, n_outs, parts, n_parts, count * item_bytes[dtype], dtype, op);
#define INTEGER_CASES(dtype)                                                                      \
  REAL_CASE(dtype, PL_SUM)                                                                        \
  REAL_CASE(dtype, PL_PRODUCT)                                                                    \
  REAL_CASE(dtype, PL_MIN)                                                                        \
  REAL_CASE(dtype, PL_MAX)
#define FLOAT_CASES(dtype) INTEGER_CASES(dtype) REAL_CASE(dtype, PL_MEAN)

TARGET static int ISA(reduce)(void *const *outs, int n_outs, const void *const *parts, int n_parts,
                       int64_t count, int dtype, int op) {
  if (dtype == PL_BOOL && (op == PL_MIN || op == PL_MAX)) dtype = PL_U8;
  if ((dtype == PL_C64 || dtype == PL_C128) && op >= PL_SUM && op <= PL_PRODUCT)
    return (dtype == PL_C64 ? ISA(reduce_c64) : ISA(reduce_c128))(outs, n_outs, parts, n_parts,
                                                                  2 * count, op);
  switch (dtype * OPS + op) {
    FLOAT_CASES(PL_F32)
    FLOAT_CASES(PL_F64)
    FLOAT_CASES(PL_F16)
    FLOAT_CASES(PL_BF16)
    INTEGER_CASES(PL_I8)
    INTEGER_CASES(PL_I16)
    INTEGER_CASES(PL_I32)
    INTEGER_CASES(PL_I64)
    INTEGER_CASES(PL_U8)
  }
  return -1;
}

/* All other macros are the same for each instruction set. */
#undef ISA
#undef TARGET
#undef VECTOR_BYTES
#undef WIDEN_F16
#undef NARROW_F16
