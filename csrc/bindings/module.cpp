// The whole extension at one glance: errors, then one register_*() per room of csrc/core.
#include "bindings/numpy_views.hpp"

namespace megapack {

void register_errors(py::module_& m);
void register_storage(py::module_& m);
void register_tokenization(py::module_& m);
void register_packing(py::module_& m);
void register_samples(py::module_& m);
void register_data(py::module_& m);
void register_planning(py::module_& m);

}  // namespace megapack

PYBIND11_MODULE(_core, m) {
    m.doc() = "megapack's C++ core: storage, tokenization, packing, schedule, gather and plans.";
    megapack::register_errors(m);
    megapack::register_storage(m);
    megapack::register_tokenization(m);
    megapack::register_packing(m);
    megapack::register_samples(m);
    megapack::register_data(m);
    megapack::register_planning(m);
}
