"""The C library, which moves and adds tensors on the CPU, and how it is built and loaded."""
