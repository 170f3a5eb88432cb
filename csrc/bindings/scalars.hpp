// Names and file names from Python. The Python code validates scalars; bindings take C++ types,
// which pybind11 converts (TypeError), and check only values that could access wrong memory.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "bindings/numpy_views.hpp"

namespace megapack {

// Returns the value of a name, or throws "overflow is 'hed'; it must be one of pad, head, promote".
template <typename T>
T choice(const std::string& given, const char* name,
         std::initializer_list<std::pair<const char*, T>> known) {
    std::string names;
    for (const auto& [known_name, value] : known) {
        if (given == known_name) return value;
        names += (names.empty() ? "" : ", ") + std::string(known_name);
    }
    throw std::invalid_argument(
        concat_message(name, " is '", given, "'; it must be one of ", names));
}

// Returns a file name for messages; surrogates, for bytes that are not UTF-8, become escapes.
inline std::string file_name(const py::str& name) {
    const auto utf8 = py::reinterpret_steal<py::bytes>(
        PyUnicode_AsEncodedString(name.ptr(), "utf-8", "backslashreplace"));
    if (!utf8) throw py::error_already_set();
    return utf8;
}

}  // namespace megapack
