#include "bindings/scalars.hpp"

namespace megapack {
namespace {

std::string shown(const py::handle& value) {
    constexpr std::size_t kMost = 60;
    const auto ascii = py::reinterpret_steal<py::str>(PyObject_ASCII(value.ptr()));
    if (!ascii) throw py::error_already_set();
    const std::string text = ascii;
    return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

// value as a Python int; refuses what only could be turned into one.
py::object python_int(const py::handle& value, const char* name) {
    const bool is_integer = PyIndex_Check(value.ptr()) != 0 && !PyBool_Check(value.ptr());
    if (!is_integer) refuse(value, name, "an integer");
    auto result = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!result) {
        PyErr_Clear();
        refuse(value, name, "an integer");
    }
    return result;
}

template <typename T>
std::string range(T low, T high) {
    if (high == std::numeric_limits<T>::max() && std::is_signed_v<T>) {
        if (low == std::numeric_limits<T>::min()) return "an integer of 64 bits";
        return concat_message("from ", low, " to 2^63 - 1");
    }
    return concat_message("from ", low, " to ", high);
}

}  // namespace

void refuse(const py::handle& value, const char* name, const std::string& wanted) {
    throw std::invalid_argument(
        concat_message(name, " is ", shown(value), "; it must be ", wanted));
}

std::int64_t integer(const py::handle& value, const char* name, std::int64_t low,
                     std::int64_t high) {
    const py::object number = python_int(value, name);
    int overflow = 0;
    const std::int64_t result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0 || result < low || result > high) refuse(number, name, range(low, high));
    return result;
}

std::uint64_t word(const py::handle& value, const char* name) {
    const py::object number = python_int(value, name);
    const std::uint64_t result = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        refuse(number, name, "from 0 to 2^64 - 1");
    }
    return result;
}

std::vector<std::int64_t> integer_list(const py::handle& values, const char* name, std::int64_t low,
                                       std::int64_t high) {
    if (!py::isinstance<py::iterable>(values)) refuse(values, name, "a list of integers");
    std::vector<std::int64_t> result;
    for (const py::handle value : values) result.push_back(integer(value, name, low, high));
    return result;
}

bool flag(const py::handle& value, const char* name) {
    if (PyBool_Check(value.ptr())) return value.ptr() == Py_True;
    const std::string type = Py_TYPE(value.ptr())->tp_name;
    if (type != "numpy.bool_" && type != "numpy.bool") refuse(value, name, "True or False");
    return PyObject_IsTrue(value.ptr()) == 1;
}

std::string text(const py::handle& value, const char* name) {
    if (!py::isinstance<py::str>(value)) refuse(value, name, "a string");
    Py_ssize_t size = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
    if (utf8 == nullptr) {
        PyErr_Clear();
        refuse(value, name, "Unicode text");
    }
    return {utf8, static_cast<std::size_t>(size)};
}

std::string file_name(const py::handle& value) {
    const auto utf8 = py::reinterpret_steal<py::bytes>(
        PyUnicode_AsEncodedString(py::str(value).ptr(), "utf-8", "backslashreplace"));
    if (!utf8) throw py::error_already_set();
    return utf8;
}

}  // namespace megapack
