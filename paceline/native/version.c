/* Tells which sources the library was built from. */
#include "core.h"

#ifndef PL_STAMP /* build.py defines it; test drivers don't */
#define PL_STAMP ""
#endif

uint32_t pl_version(void) { return PL_VERSION; }

const char *pl_stamp(void) { return PL_STAMP; }
