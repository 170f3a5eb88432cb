// DocumentLengths, and what is counted of document lengths alone.
#include "bindings/document_lengths.hpp"
#include "bindings/scalars.hpp"

namespace megapack {
namespace {

template <typename T>
Span<const T> lengths_of(const py::array& array) {
    return {static_cast<const T*>(array.data()), array.size()};
}

// f of the array as int32, int64 or uint64 numbers.
template <typename F>
auto with_lengths(const py::array& array, F f) {
    using py::detail::npy_api;
    constexpr int plain = npy_api::NPY_ARRAY_C_CONTIGUOUS_ | npy_api::NPY_ARRAY_ALIGNED_;
    check(array.ndim() == 1 && (array.flags() & plain) == plain,
          "lengths must be a contiguous, aligned array of one dimension");
    const py::dtype dtype = array.dtype();
    const char kind = dtype.kind();
    const bool known = (kind == 'i' && (dtype.itemsize() == 4 || dtype.itemsize() == 8)) ||
                       (kind == 'u' && dtype.itemsize() == 8);
    check(known && dtype.byteorder() != '>', "lengths has dtype ", std::string(py::str(dtype)),
          "; it must be int32, int64 or uint64");
    if (dtype.itemsize() == 4) return f(lengths_of<std::int32_t>(array));
    if (kind == 'i') return f(lengths_of<std::int64_t>(array));
    return f(lengths_of<std::uint64_t>(array));
}

}  // namespace

DocumentLengths::Checked DocumentLengths::check_array(const py::array& array,
                                                      std::int64_t capacity) {
    return with_lengths(array, [&](auto lengths) -> Checked {
        const py::gil_scoped_release unlocked;
        if constexpr (std::is_same_v<decltype(lengths), Span<const std::uint64_t>>) {
            check_lengths(lengths);  // none of them reaches 2^63
            return Lengths<std::int64_t>(
                {reinterpret_cast<const std::int64_t*>(lengths.data()), lengths.size()}, capacity);
        } else {
            return Lengths(lengths, capacity);
        }
    });
}

void register_lengths(py::module_& m) {
    using D = DocumentLengths;
    py::class_<D>(m, "DocumentLengths")
        .def(py::init([](const py::array& lengths, const py::object& capacity) {
                 return D(lengths, integer(capacity, "capacity", 0));
             }),
             py::arg("lengths"), py::kw_only(), py::arg("capacity") = kMaxTokens)
        .def("__len__", &D::size)
        .def_property_readonly("num_tokens", [](const D& d) { return d.totals().num_tokens; })
        .def_property_readonly("num_empty", [](const D& d) { return d.totals().num_empty; })
        .def_property_readonly("num_longer", [](const D& d) { return d.totals().num_longer; })
        .def_property_readonly("longest", [](const D& d) { return d.totals().longest; });
}

}  // namespace megapack
