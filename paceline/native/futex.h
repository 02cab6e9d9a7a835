/* Words of shared memory: reading, writing and sleeping on them; and the clock. */

#ifndef PL_FUTEX_H
#define PL_FUTEX_H

#include <stdint.h>

#include "core.h"

int64_t pl_now(void);
PL_EXPORT int64_t pl_load(const void *word);
PL_EXPORT void pl_store(void *word, int64_t value);
PL_EXPORT void pl_futex_wait(void *word, uint32_t value, int64_t nanoseconds);
PL_EXPORT void pl_futex_wake(void *word);

#endif
