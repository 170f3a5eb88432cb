// storage: maps files, reads and writes .idx, narrows tokens.
#include <sys/mman.h>

#include <memory>

#include "bindings/checked_array.hpp"
#include "core/storage/tokens.hpp"

namespace megapack {
namespace {

using Bytes = Array<std::uint8_t>;
using Range = std::pair<py::int_, py::int_>;  // smallest and largest id

// Calls f(T{}) with T the C++ type of an integer dtype.
template <typename F>
Range with_integer_type(const py::dtype& dtype, const char* name, const F& f) {
    const char kind = dtype.kind();
    const py::ssize_t size = dtype.itemsize();
    if (kind == 'i' && size == 1) return f(std::int8_t{});
    if (kind == 'i' && size == 2) return f(std::int16_t{});
    if (kind == 'i' && size == 4) return f(std::int32_t{});
    if (kind == 'i' && size == 8) return f(std::int64_t{});
    if (kind == 'u' && size == 1) return f(std::uint8_t{});
    if (kind == 'u' && size == 2) return f(std::uint16_t{});
    if (kind == 'u' && size == 4) return f(std::uint32_t{});
    if (kind == 'u' && size == 8) return f(std::uint64_t{});
    throw py::type_error(concat_message(name, " has dtype ", std::string(py::str(dtype)),
                                        "; it must be an integer type"));
}

// Views an array as elements of T, its dtype; refuses strides and misalignment.
template <typename T>
Span<T> typed_view(const py::array& array, const char* name) {
    check<py::type_error>(
        array.ndim() == 1 && (array.flags() & py::array::c_style) != 0 && is_aligned(array), name,
        " must be a contiguous, aligned 1-D array");
    auto* data = static_cast<T*>(const_cast<void*>(array.data()));
    return {data, array.size()};
}

Range token_range_of(const py::array& tokens) {
    return with_integer_type(tokens.dtype(), "tokens", [&](auto zero) -> Range {
        using T = decltype(zero);
        const auto span = typed_view<const T>(tokens, "tokens");
        const std::pair<T, T> range = unlocked([&] { return token_range(span); });
        return {range.first, range.second};
    });
}

// Copies tokens to `out` if all are in [low, high]; returns their range in any case.
template <typename From, typename To>
std::pair<From, From> store(Span<const From> tokens, Span<To> out, std::int64_t low,
                            std::int64_t high) {
    const auto range = token_range(tokens);
    // Compare as 64 bits, unsigned for `above`: an unsigned id may exceed every signed number.
    const bool above = range.second > From{0} &&
                       static_cast<std::uint64_t>(range.second) > static_cast<std::uint64_t>(high);
    const bool below = std::is_signed_v<From> && static_cast<std::int64_t>(range.first) < low;
    if (!above && !below) narrow_tokens(tokens, out);
    return range;
}

Range store_tokens(const py::array& tokens, py::array& out, std::int64_t begin, std::int64_t low,
                   std::int64_t high) {
    if (!out.writeable()) throw py::type_error("out is read-only");
    return with_integer_type(out.dtype(), "out", [&](auto out_zero) -> Range {
        using To = decltype(out_zero);
        const auto all = typed_view<To>(out, "out");
        check(low >= static_cast<std::int64_t>(std::numeric_limits<To>::min()) && high >= 0 &&
                  static_cast<std::uint64_t>(high) <=
                      static_cast<std::uint64_t>(std::numeric_limits<To>::max()),
              "limits [", low, ", ", high, "] exceed the type of out");
        return with_integer_type(tokens.dtype(), "tokens", [&](auto zero) -> Range {
            using From = decltype(zero);
            const auto span = typed_view<const From>(tokens, "tokens");
            check(begin >= 0 && begin <= all.size() && span.size() <= all.size() - begin,
                  span.size(), " tokens do not fit after position ", begin, " of ", all.size());
            const std::pair<From, From> range =
                unlocked([&] { return store(span, all.subspan(begin, span.size()), low, high); });
            return {range.first, range.second};
        });
    });
}

// Returns a new array that f(Span) fills without the GIL.
template <typename T, typename F>
py::array_t<T> filled(std::int64_t size, const F& f) {
    py::array_t<T> out(static_cast<py::ssize_t>(size));
    const Span<T> span{out.mutable_data(), size};
    unlocked([&] { f(span); });
    return out;
}

// Throws unless `itemsize` is 1, 2, 4 or 8, because the core divides by it.
void check_token_bytes(std::int64_t itemsize) {
    check(itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8, "itemsize is ",
          itemsize, "; it must be 1, 2, 4 or 8");
}

py::dict index_header(const Bytes& bytes, std::int64_t file_bytes, const py::str& name) {
    const IndexHeader header =
        parse_index_header(view(bytes, "bytes"), file_bytes, file_name(name));
    py::dict result;
    result["dtype_code"] = header.dtype_code;
    result["num_sequences"] = header.num_sequences;
    result["num_document_indices"] = header.num_document_indices;
    result["num_documents"] = header.num_documents();
    result["lacks_document_indices"] = header.lacks_document_indices();
    result["lengths_at"] = header.lengths_at();
    result["pointers_at"] = header.pointers_at();
    result["document_indices_at"] = header.document_indices_at();
    result["modes_at"] = header.modes_at();
    return result;
}

py::array document_lengths_of(const AnyArray& bytes, const py::str& name) {
    const IndexView index = whole_index(bytes, name);
    bool fits = false;
    auto narrow = filled<std::int32_t>(index.num_documents(), [&](Span<std::int32_t> out) {
        fits = document_lengths(index, out);
    });
    if (fits) return std::move(narrow);
    return filled<std::int64_t>(index.num_documents(),
                                [&](Span<std::int64_t> out) { document_lengths(index, out); });
}

// Maps a whole file, read-only. Unlike Python's mmap it keeps no descriptor: a source may have tens
// of thousands of files.
py::array_t<std::uint8_t> map_file(int descriptor, std::int64_t num_bytes) {
    const auto size = static_cast<std::size_t>(num_bytes);
    void* address = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    struct Mapping {
        void* address;
        std::size_t size;
    };
    const py::capsule owner(new Mapping{address, size}, [](void* kept) {
        const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(kept));
        munmap(mapping->address, mapping->size);
    });
    py::array_t<std::uint8_t> bytes(static_cast<py::ssize_t>(size),
                                    static_cast<const std::uint8_t*>(address), owner);
    bytes.attr("setflags")(py::arg("write") = false);
    return bytes;
}

// Binds a function that copies an array of an .idx.
template <typename T, typename Copy, typename Size>
void def_column(py::module_& m, const char* function, Copy copy, Size size) {
    m.def(
        function,
        [=](const AnyArray& bytes, const py::str& name) {
            const IndexView index = whole_index(bytes, name);
            return filled<T>(size(index), [&](Span<T> out) { copy(index, out); });
        },
        py::arg("bytes"), py::arg("name"));
}

void register_reading(py::module_& m) {
    m.attr("BLOCK_BYTES") = kBlockBytes;
    m.def(
        "block_checksums",
        [](const Bytes& bytes) {
            const auto given = view(bytes, "bytes");
            return computed([&] { return block_checksums(given); });
        },
        py::arg("bytes").noconvert());
    py::class_<CheckedArray>(m, "CheckedArray")
        .def(py::init<const py::array&, const Array<std::uint64_t>&, const py::str&,
                      const std::string&>(),
             py::arg("array").noconvert(), py::arg("checksums").noconvert(), py::kw_only(),
             py::arg("name"), py::arg("remedy"))
        .def_property_readonly("unchecked", &CheckedArray::array)
        .def("require", &CheckedArray::require, py::arg("begin"), py::arg("end"))
        .def("require_at", &CheckedArray::require_at, py::arg("positions").noconvert());
    m.def("map_file", &map_file, py::arg("descriptor"), py::arg("num_bytes"));
    m.def("index_header", &index_header, py::arg("bytes").noconvert(), py::arg("file_bytes"),
          py::arg("name"));
    m.def("document_lengths", &document_lengths_of, py::arg("bytes"), py::arg("name"));
    m.def(
        "document_offsets",
        [](const AnyArray& bytes, const py::str& name, std::int64_t itemsize) {
            check_token_bytes(itemsize);
            const IndexView index = whole_index(bytes, name);
            return filled<std::int64_t>(index.num_documents() + 1, [&](Span<std::int64_t> out) {
                document_offsets(index, itemsize, out);
            });
        },
        py::arg("bytes"), py::arg("name"), py::arg("itemsize"));
    def_column<std::int32_t>(m, "sequence_lengths", copy_sequence_lengths,
                             [](const IndexView& index) { return index.num_sequences(); });
    def_column<std::int64_t>(m, "sequence_pointers", copy_sequence_pointers,
                             [](const IndexView& index) { return index.num_sequences(); });
    def_column<std::int64_t>(m, "document_indices", copy_document_indices,
                             [](const IndexView& index) { return index.num_documents() + 1; });
}

void register_writing(py::module_& m) {
    m.def("token_range", &token_range_of, py::arg("tokens"));
    m.def("store_tokens", &store_tokens, py::arg("tokens"), py::arg("out"), py::arg("begin"),
          py::arg("low"), py::arg("high"));
    m.def(
        "scan_lengths",
        [](const Array<std::int32_t>& lengths, std::int64_t itemsize, std::int64_t begin) {
            check_token_bytes(itemsize);
            const auto span = view(lengths, "lengths");
            std::int64_t end = 0;
            auto out = filled<std::int64_t>(span.size(), [&](Span<std::int64_t> pointers) {
                end = scan_lengths(span, itemsize, begin, pointers);
            });
            return std::make_pair(std::move(out), end);
        },
        py::arg("lengths").noconvert(), py::arg("itemsize"), py::arg("begin"));
    m.def(
        "shift_document_ends",
        [](const Array<std::int64_t>& ends, std::int64_t num_sequences, std::int64_t previous,
           std::int64_t begin) {
            const auto span = view(ends, "ends");
            std::int64_t last = 0;
            auto out = filled<std::int64_t>(span.size(), [&](Span<std::int64_t> shifted) {
                last = shift_document_ends(span, num_sequences, previous, begin, shifted);
            });
            return std::make_pair(std::move(out), last);
        },
        py::arg("ends").noconvert(), py::arg("num_sequences"), py::arg("previous"),
        py::arg("begin"));
}

}  // namespace

void register_storage(py::module_& m) {
    register_reading(m);
    register_writing(m);
}

}  // namespace megapack
