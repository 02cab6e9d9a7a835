/* Element-wise reductions, scaled copies and plain copies of tensors in memory.

   The functions know nothing of Python or torch. All pointers are aligned to their elements.
   They allocate nothing, keep no state, and may be called from many threads at once. */
#ifndef PACELINE_REDUCE_H
#define PACELINE_REDUCE_H

#include <stdint.h>

#ifndef PL_EXPORT
#define PL_EXPORT __attribute__((visibility("default")))
#endif

enum pl_dtype {
    PL_F32 = 0, PL_F64, PL_F16, PL_BF16, PL_I8, PL_I16, PL_I32, PL_I64, PL_U8, PL_BOOL, PL_C64,
    PL_C128
};
enum pl_op { PL_SUM = 0, PL_MEAN, PL_PRODUCT, PL_MIN, PL_MAX, PL_AND, PL_OR, PL_XOR };

/* Reduce `parts` element by element, in their order, and store the result to every one of `outs`.

   The rules and the bits are those of `reduce_parts` in paceline/comm/reduction_rules.py: halves
   are added and multiplied in float32 and rounded once; a mean is the sum times 1/n if n is a power
   of two, else divided by n; integers wrap; min and max give nan if one part is nan. PL_AND, PL_OR
   and PL_XOR are torch.bitwise_and and so on, for integers and bool; paceline has no such `op`.

   Where torch has no one answer (its vector loop and the tail of that loop differ), the bits are
   those of its vector loop: the sign of a min or max of +0 and -0 (the later part wins), and
   products and means of complex numbers. Sign and payload of a nan are not defined.

   outs: Where the result goes, n_outs >= 1. An out may be exactly one of the parts; otherwise
       outs and parts don't overlap.
   parts: The inputs, n_parts >= 1.
   weights: NULL, or a factor for each part: parts are multiplied by them first, and each product is
       rounded to the dtype that the sum is held in. A weight of 0 leaves its part out, even if that
       holds nan. Only for sums and means of floating dtypes.
   count: Number of elements of each part.

   Returns 0, or -1 if there is no such operation for the dtype; nothing is written then. */
PL_EXPORT int pl_reduce(void *const *outs, int n_outs, const void *const *parts, int n_parts,
                        const double *weights, int64_t count, int dtype, int op);

/* Write x * factor to `out`, with the bits of torch.mul(x, factor, out=out).

   A factor of 1 copies, a factor of 0 writes zeros even if x holds nan. `out` may be `x`.
   Returns 0, or -1 if the dtype is not a floating one. */
PL_EXPORT int pl_scale_copy(void *out, const void *x, int64_t count, int dtype, double factor);

/* Add x * factor to `out`, with the bits of out.add_(x, alpha=factor).

   Like torch, this rounds the factor to the dtype, and product and sum once together if the
   processor can (others than x86 before AVX2). A factor of 0 adds nothing, even if x holds nan.
   `out` may be `x`. Torch rounds the product of two halves on its own in the last few elements;
   here all are alike.
   Returns 0, or -1 if the dtype is not a floating one. */
PL_EXPORT int pl_scale_add(void *out, const void *x, int64_t count, int dtype, double factor);

/* Copy `nbytes` bytes. The ranges don't overlap, or are the same. */
PL_EXPORT void pl_copy(void *to, const void *from, int64_t nbytes);

#if defined(__x86_64__)
/* Whether this processor has AVX2, FMA and F16C. For the files of this library alone. */
extern int pl_has_avx2;
#endif

#endif
