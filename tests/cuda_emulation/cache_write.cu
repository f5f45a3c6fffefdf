// The cache write by itself: quicker to compile for many pairs of types than the whole library.
#include "cache_write.cuh"

extern "C" const char* pagedattn_error(int code) { return cudaGetErrorString(code); }
