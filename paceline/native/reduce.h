/* Element-wise reductions of tensors in memory.

   The functions know nothing of Python or torch. All pointers are aligned to their elements.
   They allocate nothing, keep no state, and may be called from many threads at once. */
#ifndef PL_REDUCE_H
#define PL_REDUCE_H

#include "core.h"

#include <string.h>

/* The order is that of DTYPES and OPS in paceline/comm/. */
enum pl_dtype {
  PL_F32 = 0, PL_F64, PL_F16, PL_BF16, PL_I8, PL_I16, PL_I32, PL_I64, PL_U8, PL_BOOL, PL_C64,
  PL_C128
};
enum pl_op { PL_SUM = 0, PL_MEAN, PL_PRODUCT, PL_MIN, PL_MAX };

/* Reduce `parts` element by element, in their order, and store the result to every one of `outs`.

   The rules and the bits are those of `reduce_parts` in paceline/comm/reduction_rules.py: halves
   are added and multiplied in float32 and rounded once; a mean is the sum times 1/n if n is a power
   of two, else divided by n; integers wrap; min and max give nan if one part is nan.

   If torch's vector loop and the tail of that loop differ, the bits are those of its vector loop:
   the sign of a min or max of +0 and -0 (the later part wins), and products and means of complex
   numbers. Sign and payload of a nan are not defined.

   outs: Where the result goes, n_outs >= 1. An out may be exactly one of the parts; otherwise
       outs and parts don't overlap.
   parts: The inputs, n_parts >= 1.
   count: Number of elements of each part.

   Returns 0, or -1 if there is no such operation for the dtype; nothing is written then. */
PL_EXPORT int pl_reduce(void *const *outs, int n_outs, const void *const *parts, int n_parts,
                        int64_t count, int dtype, int op);

/* One tensor to copy: `count` elements. */
typedef struct pl_scaled_copy {
  void *to;
  const void *from;
  int64_t count;
} pl_scaled_copy;

/* Copy tensors, times a factor that is first rounded to their dtype, as torch does. A factor of 0
   gives zeros, even for nan. `to` and `from` don't overlap.

   dtype: PL_F32 or PL_F64.

   Returns 0, or -1 for another dtype; nothing is written then. */
PL_EXPORT int pl_copy_scaled(const pl_scaled_copy *copies, int64_t n_copies, int dtype,
                             double factor);

/* Copy `nbytes` bytes. The ranges don't overlap, or are the same. */
static inline void pl_copy(void *to, const void *from, int64_t nbytes) {
  if (to != from && nbytes > 0) memcpy(to, from, (size_t)nbytes);
}

#if defined(__x86_64__) && !defined(PL_PORTABLE)
/* Whether this processor has AVX2 and F16C. */
extern int pl_has_avx2;
#endif

#endif
