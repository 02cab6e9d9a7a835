/* The codings of paceline/codec/dense.py that cut float32 into blocks, and selection for topk.

   Bits and layout of messages are those of the Python classes int8, int4, sign and topk. The
   functions allocate nothing, keep no state, and may be called from many threads at once. They read
   and write the given elements only. Ranges don't overlap.

   Not defined by torch, so not matched: the sign of a scale that is 0 (here it is +0; in torch it
   depends on the position of the block), and payloads of nan. */
#ifndef PL_CODECS_H
#define PL_CODECS_H

#include "core.h"

enum pl_coding { PL_INT8 = 0, PL_INT4, PL_SIGN };

/* Encode `count` elements of `x`.

   block: Elements of a block, a multiple of 1 (int8), 2 (int4) or 8 (sign). The last one may be
       shorter. Scales of sign are those of torch on one thread, in blocks of up to 2^24 elements.
   noise: NULL rounds to the nearest level, ties to even. Or `count` numbers in [0, 1), one for each
       element: level + noise is rounded down. Sign ignores it.
   scales: One for each block.
   levels: `count` bytes for int8; half of it, rounded up, for int4; an eighth for sign.

   Returns 0, or -1 if there is no such coding or block; nothing is written then. */
PL_EXPORT int pl_encode(int coding, const float *x, int64_t count, int64_t block,
                        const float *noise, float *scales, uint8_t *levels);

/* Write what the message says to `out`, level * scale for each element. See pl_encode. */
PL_EXPORT int pl_decode(int coding, float *out, int64_t count, int64_t block, const float *scales,
                        const uint8_t *levels);

/* Add level * scale * factor to each element of `out`. Products and sum are rounded one by one, so
   that all processors get the same bits. A factor of -1 subtracts, like `add(..., minus=True)`. */
PL_EXPORT int pl_decode_add(int coding, float *out, int64_t count, int64_t block,
                            const float *scales, const uint8_t *levels, float factor);

/* Find the elements whose absolute value is not less than `cutoff`; nan isn't less.

   Writes their indices in ascending order, at most `capacity` of them. count < 2^31.
   Returns how many there are, which may be more than `capacity`. */
PL_EXPORT int64_t pl_find_large(const float *x, int64_t count, float cutoff, int32_t *indices,
                            int64_t capacity);

#endif
