// What the host asks of a call's memory before it picks a kernel.
#pragma once

#include <initializer_list>

#include "problem_class.cuh"

namespace pagedattn {

/// Whether every one of these is a multiple of `size` bytes, an element having `element`.
template <class... Strides>
inline bool aligned(int size, int element, const void* pointer, Strides... strides) {
  bool fits = reinterpret_cast<uintptr_t>(pointer) % size == 0;
  for (const int64_t stride : {static_cast<int64_t>(strides)...})
    fits = fits && stride * element % size == 0;
  return fits;
}

}  // namespace pagedattn
