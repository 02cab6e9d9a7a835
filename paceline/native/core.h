/* What all parts of the C library share. */
#ifndef PL_CORE_H
#define PL_CORE_H

#include <stdint.h>

/* Marks a function that Python calls. All others stay inside the library (-fvisibility=hidden). */
#define PL_EXPORT __attribute__((visibility("default")))

/* Version of the interface. Raise it with `VERSION` in library.py whenever an exported function
 * is added, removed, or takes other arguments: a library of older sources is then refused. */
#define PL_VERSION 3

PL_EXPORT uint32_t pl_version(void);

/* Sources, flags and compiler of this library, as build.py compares them. */
PL_EXPORT const char *pl_stamp(void);

#endif
