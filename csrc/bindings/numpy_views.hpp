// Conversion of numpy arrays to spans (checked; copied only if they are unaligned) and of vectors
// to numpy arrays (moved, never copied). Every file of bindings/ includes this first: pybind11
// needs Python.h before other headers.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/check.hpp"
#include "core/base/span.hpp"

namespace megapack {
namespace py = pybind11;

// With py::arg().noconvert(), a list or an array of a wrong dtype or stride raises TypeError;
// read-only and memory-mapped arrays are accepted without a copy.
template <typename T>
using Array = py::array_t<T, py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_>;

inline bool is_aligned(const py::array& array) {
    return (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
}

// A dtype in a message. Its name takes microseconds, so only a message asks for it.
struct NameOf {
    const py::dtype& dtype;
};

inline std::ostream& operator<<(std::ostream& out, const NameOf& name) {
    return out << std::string(py::str(name.dtype));
}

// An output: the memory of the caller, never a copy.
template <typename T>
using OutputArray = py::array_t<T, py::array::c_style>;

template <typename T>
Span<const T> view(const Array<T>& array, const char* name) {
    check(array.ndim() == 1, name, " has ", array.ndim(), " dimensions; it must have 1");
    return {array.data(), array.size()};
}

template <typename T>
Span<T> mutable_view(OutputArray<T>& array, const char* name) {
    check(array.ndim() == 1, name, " has ", array.ndim(), " dimensions; it must have 1");
    check(array.writeable() && is_aligned(array), name,
          " is read-only or not aligned; pass a writable, aligned array");
    return {array.mutable_data(), array.size()};
}

template <typename T>
py::array_t<T> to_numpy(std::vector<T>&& values) {
    auto owner = std::make_unique<std::vector<T>>(std::move(values));
    T* data = owner->data();
    const auto size = static_cast<py::ssize_t>(owner->size());
    py::capsule free_when_done(owner.get(),
                               [](void* p) { delete static_cast<std::vector<T>*>(p); });
    owner.release();
    return py::array_t<T>(size, data, free_when_done);
}

// Calls f() without the GIL; f must not use Python objects.
template <typename F>
auto unlocked(const F& f) {
    const py::gil_scoped_release release;
    return f();
}

// Calls f() without the GIL and returns its vector as an array.
template <typename F>
auto computed(const F& f) {
    return to_numpy(unlocked(f));
}

}  // namespace megapack
