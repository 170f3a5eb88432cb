// int32 or int64 arrays, aligned or not, as core Integers; a view: the caller keeps the array.
#pragma once

#include "bindings/numpy_views.hpp"
#include "core/index/integers.hpp"

namespace megapack {

inline Integers integers(const py::array& array, const char* name) {
    const py::dtype dtype = array.dtype();
    const bool is_integer = dtype.kind() == 'i' && (dtype.itemsize() == 4 || dtype.itemsize() == 8);
    check(is_integer && dtype.byteorder() != '>', name, " has dtype ", std::string(py::str(dtype)),
          "; it must be int32 or int64");
    check(array.ndim() == 1 && (array.size() < 2 || array.strides(0) == dtype.itemsize()), name,
          " must be one contiguous dimension");
    return {array.data(), array.size(), dtype.itemsize() == 8};
}

}  // namespace megapack
