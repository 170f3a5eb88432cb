// C++ exceptions -> Python exceptions. invalid_argument, out_of_range and overflow_error are
// translated by pybind11 (ValueError, IndexError, OverflowError); these are the others. The
// translator is this module's own: what other extensions of the process throw is their affair.
#include "bindings/numpy_views.hpp"

namespace megapack {
namespace {

void raise_as(const char* name, const char* message) {
    const py::object type = py::module_::import("megapack.errors").attr(name);
    PyErr_SetString(type.ptr(), message);
}

}  // namespace

void register_errors(py::module_& m) {
    static_cast<void>(m);
    py::register_local_exception_translator([](std::exception_ptr pending) {
        try {
            if (pending) std::rethrow_exception(pending);
        } catch (const FormatError& error) {
            raise_as("FormatError", error.what());
        } catch (const DataError& error) {
            raise_as("DataError", error.what());
        }
    });
}

}  // namespace megapack
