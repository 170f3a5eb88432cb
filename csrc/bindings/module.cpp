// The extension module: translation of errors, then a register_*() per folder of csrc/core.
#include "bindings/numpy_views.hpp"

namespace megapack {

void register_storage(py::module_& m);
void register_tokenization(py::module_& m);
void register_packing(py::module_& m);
void register_index(py::module_& m);
void register_schedule(py::module_& m);
void register_planning(py::module_& m);
void register_gather(py::module_& m);

namespace {

void raise_as(const char* name, const char* message) {
    const py::object type = py::module_::import("megapack.errors").attr(name);
    PyErr_SetString(type.ptr(), message);
}

// Translates the core's own exceptions; pybind11 translates invalid_argument, out_of_range and
// overflow_error (ValueError, IndexError, OverflowError). The translator is local to this module.
void translate_errors() {
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

}  // namespace
}  // namespace megapack

PYBIND11_MODULE(_core, m) {
    m.doc() = "megapack's C++ core: storage, text, packing, index, schedule, planning, gather.";
    megapack::translate_errors();
    megapack::register_storage(m);
    megapack::register_tokenization(m);
    megapack::register_packing(m);
    megapack::register_index(m);
    megapack::register_schedule(m);
    megapack::register_planning(m);
    megapack::register_gather(m);
}
