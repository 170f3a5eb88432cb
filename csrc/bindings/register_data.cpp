// data: the gather, the schedule and the balance, one file each.
#include "bindings/numpy_views.hpp"

namespace megapack {

void register_gather(py::module_& m);
void register_schedule(py::module_& m);

void register_data(py::module_& m) {
    register_gather(m);
    register_schedule(m);
}

}  // namespace megapack
