// Scalars and names from Python. megapack's Python code validates what a user gives; the bindings
// take C++ types, which pybind11 converts (TypeError), and check what would touch wrong memory.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "bindings/numpy_views.hpp"

namespace megapack {

// The value of a name: "overflow is 'hed'; it must be one of pad, head, promote".
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

// File name for error messages; bytes that are not UTF-8 become escapes.
inline std::string file_name(const py::str& name) {
    const auto utf8 = py::reinterpret_steal<py::bytes>(
        PyUnicode_AsEncodedString(name.ptr(), "utf-8", "backslashreplace"));
    if (!utf8) throw py::error_already_set();
    return utf8;
}

// The same of scalars that a binding takes as py::object, with a range.
inline std::int64_t integer(const py::object& value, const char* name,
                            std::int64_t low = std::numeric_limits<std::int64_t>::min(),
                            std::int64_t high = std::numeric_limits<std::int64_t>::max()) {
    const auto number = value.cast<std::int64_t>();
    check(number >= low && number <= high, name, " is ", number, "; it must be from ", low, " to ",
          high);
    return number;
}
inline std::uint64_t word(const py::object& value, const char* /*name*/) {
    return value.cast<std::uint64_t>();
}
inline bool flag(const py::object& value, const char* /*name*/) {
    return value.cast<bool>();
}
template <typename T>
T choice(const py::object& value, const char* name,
         std::initializer_list<std::pair<const char*, T>> known) {
    return choice<T>(value.cast<std::string>(), name, known);
}

}  // namespace megapack
