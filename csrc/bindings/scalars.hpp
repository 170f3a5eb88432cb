// The seam: Python's scalars and names in, checked, each refusal with the name of its argument.
// Every binding takes them as py::object and asks here, so that nothing is left to pybind11's own
// conversions, which take True for 1 and speak of overloads. All errors are ValueErrors.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bindings/numpy_views.hpp"

namespace megapack {

// An int or a numpy integer from low to high; a bool or a float is none.
std::int64_t integer(const py::handle& value, const char* name,
                     std::int64_t low = std::numeric_limits<std::int64_t>::min(),
                     std::int64_t high = std::numeric_limits<std::int64_t>::max());
// The same from 0 to 2^64 - 1: seeds and keys.
std::uint64_t word(const py::handle& value, const char* name);
// The same for each of an iterable.
std::vector<std::int64_t> integer_list(
    const py::handle& values, const char* name,
    std::int64_t low = std::numeric_limits<std::int64_t>::min(),
    std::int64_t high = std::numeric_limits<std::int64_t>::max());

// True or False (numpy's, too), nothing that is merely true.
bool flag(const py::handle& value, const char* name);

// Text that is Unicode, as UTF-8.
std::string text(const py::handle& value, const char* name);

// A file's name for messages: bytes that are no UTF-8 are shown as escapes.
std::string file_name(const py::handle& value);

// "overflow is 'hed'; it must be one of pad, head, promote"
[[noreturn]] void refuse(const py::handle& value, const char* name, const std::string& wanted);

template <typename T>
T choice(const py::handle& value, const char* name,
         std::initializer_list<std::pair<const char*, T>> known) {
    std::string names;
    for (const auto& [known_name, result] : known) {
        if (py::isinstance<py::str>(value) && value.equal(py::str(known_name))) return result;
        names += (names.empty() ? "" : ", ") + std::string(known_name);
    }
    refuse(value, name, "one of " + names);
}

}  // namespace megapack
