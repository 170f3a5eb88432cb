// C++ exceptions -> Python exceptions. invalid_argument, out_of_range and overflow_error are
// translated by pybind11 (ValueError, IndexError, OverflowError); these are the others.
#include <system_error>

#include "bindings/numpy_views.hpp"

namespace megapack {
namespace {

void raise_as(const char* name, const char* message) {
    const py::object type = py::module_::import("megapack.errors").attr(name);
    PyErr_SetString(type.ptr(), message);
}

// OSError(errno, strerror, filename), so that Python picks FileNotFoundError and its siblings.
void raise_os_error(const std::system_error& error) {
    std::string path = error.what();
    const std::string suffix = ": " + error.code().message();
    if (path.size() > suffix.size()) path.resize(path.size() - suffix.size());
    const py::object os_error = py::module_::import("builtins").attr("OSError");
    const py::object value = os_error(error.code().value(), error.code().message(), path);
    PyErr_SetObject(py::type::of(value).ptr(), value.ptr());
}

}  // namespace

void register_errors(py::module_& m) {
    static_cast<void>(m);
    py::register_exception_translator([](std::exception_ptr pending) {
        try {
            if (pending) std::rethrow_exception(pending);
        } catch (const FormatError& error) {
            raise_as("FormatError", error.what());
        } catch (const DataError& error) {
            raise_as("DataError", error.what());
        } catch (const std::system_error& error) {
            raise_os_error(error);
        }
    });
}

}  // namespace megapack
