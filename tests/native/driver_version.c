/* The library says its version. */
#include <stdio.h>

#include "core.h"

int main(void) {
    printf("%u\n", (unsigned)pl_version());
    return pl_version() == PL_VERSION ? 0 : 1;
}
