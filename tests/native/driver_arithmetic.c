/* Reductions and codings of every dtype and of odd lengths, in memory of its exact size. Values are
   small integers, which every dtype holds, so plain loops give the exact results. */

#include "driver.h"

#include "codecs.h"
#include "reduce.h"

enum { MOST_PARTS = 5, DTYPES = PL_C128 + 1, OPS = PL_MAX + 1 };

static const int64_t counts[] = {0, 1, 7, 8, 31, 64, 129, 700};
enum { COUNTS = sizeof counts / sizeof *counts };

/* Bytes of a lane, and lanes of an element: a complex number has two. */
static const int64_t lane_bytes[DTYPES] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 4, 8};
static int64_t lanes(int dtype) { return dtype >= PL_C64 ? 2 : 1; }

static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* float16 of numbers that it holds, other than the tiny ones: a float has 13 more bits behind the
   point, and exponents that are larger by 112. */
static uint16_t half_of_float(float value) {
  uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000;
  return (uint16_t)(value == 0 ? sign : sign | ((bits & 0x7fffffff) - (112u << 23)) >> 13);
}

static float float_of_half(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fffu;
  return float_of_bits(rest == 0 ? sign : sign | ((rest << 13) + (112u << 23)));
}

#define STORE(T, value) (*(T *)place = (T)(value))
#define LOAD(T) ((double)*(const T *)place)

static void put_lane(int dtype, void *x, int64_t i, double value) {
  void *place = (char *)x + i * lane_bytes[dtype];
  switch (dtype) {
    case PL_F32: case PL_C64: STORE(float, value); break;
    case PL_F64: case PL_C128: STORE(double, value); break;
    case PL_F16: STORE(uint16_t, half_of_float((float)value)); break;
    case PL_BF16: STORE(uint16_t, bits_of_float((float)value) >> 16); break;
    case PL_I8: STORE(int8_t, value); break;
    case PL_I16: STORE(int16_t, value); break;
    case PL_I32: STORE(int32_t, value); break;
    case PL_I64: STORE(int64_t, value); break;
    default: STORE(uint8_t, value);
  }
}

static double get_lane(int dtype, const void *x, int64_t i) {
  const void *place = (const char *)x + i * lane_bytes[dtype];
  switch (dtype) {
    case PL_F32: case PL_C64: return LOAD(float);
    case PL_F64: case PL_C128: return LOAD(double);
    case PL_F16: return float_of_half(*(const uint16_t *)place);
    case PL_BF16: return float_of_bits((uint32_t) * (const uint16_t *)place << 16);
    case PL_I8: return LOAD(int8_t);
    case PL_I16: return LOAD(int16_t);
    case PL_I32: return LOAD(int32_t);
    case PL_I64: return LOAD(int64_t);
    default: return LOAD(uint8_t);
  }
}

/* A number from -3 to 3; from 0 to 3, or 0 or 1, if the dtype has no others. */
static double pick_value(int dtype, int64_t part, int64_t i) {
  int64_t number = (int64_t)(mix((uint64_t)dtype, (uint64_t)part, (uint64_t)i) % 7) - 3;
  if (dtype == PL_U8) return (double)(number < 0 ? -number : number);
  return (double)(dtype == PL_BOOL ? number & 1 : number);
}

static double fold(int op, double a, double b) {
  switch (op) {
    case PL_SUM: case PL_MEAN: return a + b;
    case PL_PRODUCT: return a * b;
    case PL_MIN: return a < b ? a : b;
    default: return a > b ? a : b;
  }
}

/* Make `n` lanes of a part, which begin an element behind aligned memory and end with it. */
static char *make_part(int dtype, int64_t part, int64_t n, char **memory) {
  int64_t start = lanes(dtype) * lane_bytes[dtype];
  *memory = allocate(start + n * lane_bytes[dtype]);
  for (int64_t i = 0; i < n; i++)
    put_lane(dtype, *memory + start, i, pick_value(dtype, part, i));
  return *memory + start;
}

/* ---- reductions */

/* Reduce to the last part and to memory of its own. Returns whether there is such an operation. */
static int reduce(int dtype, int op, int n_parts, int64_t count) {
  int64_t n = count * lanes(dtype);
  char *memories[MOST_PARTS + 1], *parts[MOST_PARTS + 1];
  for (int k = 0; k <= n_parts; k++) parts[k] = make_part(dtype, k, n, &memories[k]);
  void *outs[2] = {parts[n_parts], parts[n_parts - 1]};
  int result = pl_reduce(outs, 2, (const void *const *)parts, n_parts, count, dtype, op);
  CHECK(result == 0 || result == -1);
  for (int64_t i = 0; i < n; i++) {
    double expected = pick_value(dtype, 0, i);
    for (int k = 1; k < n_parts; k++) expected = fold(op, expected, pick_value(dtype, k, i));
    if (op == PL_MEAN) expected /= n_parts;
    if (dtype == PL_I8) expected = (int8_t)(int64_t)expected; /* it wraps: 3 ** 5 > 127 */
    for (int o = 0; o < 2; o++) {
      if (result == -1) expected = pick_value(dtype, n_parts - o, i); /* nothing is written */
      CHECK(get_lane(dtype, outs[o], i) == expected);
    }
  }
  for (int k = 0; k <= n_parts; k++) free(memories[k]);
  return result == 0;
}

static void reduce_everything(void) {
  for (int dtype = 0; dtype < DTYPES; dtype++) {
    for (int op = 0; op < OPS; op++) {
      if (dtype >= PL_C64 && op == PL_PRODUCT) continue; /* not lane by lane */
      int possible = 0, tried = 0;
      for (int n_parts = 1; n_parts <= MOST_PARTS; n_parts++) {
        if (op == PL_MEAN && n_parts > 2 && n_parts != 4) continue; /* not exact */
        for (int c = 0; c < COUNTS; c++, tried++)
          possible += reduce(dtype, op, n_parts, counts[c]);
      }
      CHECK(possible == 0 || possible == tried);
      CHECK(possible || op != PL_SUM || dtype == PL_BOOL);
    }
  }
}

/* ---- codings */

static float *make_floats(int64_t n, int64_t seed, float low, float high) {
  float *x = allocate(n * 4);
  for (int64_t i = 0; i < n; i++)
    x[i] = low + (high - low) * (float)(mix(40, (uint64_t)seed, (uint64_t)i) % 1000) / 1000;
  return x;
}

/* What is decoded is near to what was encoded, and cancels itself. */
static void encode_and_decode(int coding, int64_t n, int64_t block, int with_noise) {
  static const int64_t per_byte[] = {1, 2, 8};
  int64_t n_levels = (n + per_byte[coding] - 1) / per_byte[coding];
  float *x = make_floats(n, 1, -2, 3), *noise = make_floats(n, 2, 0, 1), *out = allocate(n * 4);
  float *scales = allocate((n + block - 1) / block * 4);
  uint8_t *levels = allocate(n_levels);
  CHECK(pl_encode(coding, x, n, block, with_noise ? noise : NULL, scales, levels) == 0);
  CHECK(pl_decode(coding, out, n, block, scales, levels) == 0);
  for (int64_t i = 0; i < n; i++) {
    float scale = scales[i / block], error = out[i] - x[i];
    if (coding == PL_SIGN)
      CHECK((out[i] == scale || out[i] == -scale) && (x[i] == 0 || (out[i] < 0) == (x[i] < 0)));
    else
      CHECK((error < 0 ? -error : error) <= scale * (with_noise ? 1.001f : 0.501f));
  }
  CHECK(pl_decode_add(coding, out, n, block, scales, levels, -1) == 0);
  for (int64_t i = 0; i < n; i++) CHECK(out[i] == 0);
  free(x), free(noise), free(out), free(scales), free(levels);
}

static void select_large(int64_t n) {
  float *x = make_floats(n, 3, -1, 1);
  int32_t *indices = allocate(n * 4);
  int64_t n_large = pl_find_large(x, n, 0.5f, indices, n), next = 0;
  for (int64_t i = 0; i < n; i++) {
    if (x[i] < 0.5f && x[i] > -0.5f) continue;
    CHECK(next < n_large && indices[next] == i);
    next++;
  }
  CHECK(next == n_large);
  CHECK(pl_find_large(x, n, 0.5f, indices, n_large / 2) == n_large); /* writes no more than half */
  free(x), free(indices);
}

int main(void) {
  reduce_everything();
  for (int c = 0; c < COUNTS; c++) {
    for (int coding = PL_INT8; coding <= PL_SIGN; coding++) {
      for (int64_t block = 8; block <= 512; block *= 4) {
        encode_and_decode(coding, counts[c], block, 0);
        encode_and_decode(coding, counts[c], block, 1);
      }
    }
    select_large(counts[c]);
  }
  return 0;
}
