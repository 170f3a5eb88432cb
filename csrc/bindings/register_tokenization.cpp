// tokenization: JSON lines, UTF-8, documents framed by special tokens.
#include "bindings/scalars.hpp"
#include "core/text/documents.hpp"
#include "core/text/jsonl.hpp"

namespace megapack {
namespace {

using Bytes = py::array_t<std::uint8_t>;
using Numbers = py::array_t<std::int64_t>;

// Returns (text, offsets (lines + 1), status (lines), line_begin (lines)), see core/text/jsonl.hpp.
std::tuple<Bytes, Numbers, Bytes, Numbers> py_extract_jsonl(const Array<std::uint8_t>& buffer,
                                                            const std::string& key,
                                                            const std::string& values) {
    const auto bytes = view(buffer, "buffer");
    const auto wanted = choice<JsonValues>(values, "values",
                                           {{"strings", JsonValues::strings},
                                            {"scalars", JsonValues::scalars},
                                            {"lists", JsonValues::lists},
                                            {"any", JsonValues::any}});
    JsonlTexts texts = unlocked([&] { return extract_jsonl(bytes, key, wanted); });
    return {to_numpy(std::move(texts.text)), to_numpy(std::move(texts.offsets)),
            to_numpy(std::move(texts.status)), to_numpy(std::move(texts.line_begin))};
}

// Calls measure(text, offsets) without the GIL.
template <typename Measure>
auto per_document(Measure measure) {
    return [measure](const Array<std::uint8_t>& text, const Array<std::int64_t>& offsets) {
        const auto bytes = view(text, "text");
        const auto bounds = view(offsets, "offsets");
        return computed([&] { return measure(bytes, bounds); });
    };
}

py::array_t<std::uint8_t> py_has_characters(const Array<std::uint8_t>& text,
                                            const Array<std::int64_t>& offsets,
                                            const Array<std::int64_t>& ranges) {
    const auto pairs = view(ranges, "ranges");
    const auto measure = [&](auto bytes, auto bounds) {
        return has_characters(bytes, bounds, pairs);
    };
    return per_document(measure)(text, offsets);
}

// Returns (tokens, offsets, marked), see core/text/documents.hpp.
template <typename Stored, typename Id>
std::tuple<py::array_t<Stored>, Numbers, Numbers> py_frame_documents(
    const Array<Id>& ids, const Array<std::int64_t>& offsets,
    const std::vector<std::int64_t>& prefix, const std::vector<std::int64_t>& suffix,
    std::int64_t vocab_size, const Array<std::uint8_t>& marks) {
    const auto id_view = view(ids, "ids");
    const auto bounds = view(offsets, "offsets");
    const auto mark_view = view(marks, "marks");
    FramedDocuments<Stored> framed = unlocked([&] {
        return frame_documents<Stored>(id_view, bounds, Span<const std::int64_t>(prefix),
                                       Span<const std::int64_t>(suffix), vocab_size, mark_view);
    });
    return {to_numpy(std::move(framed.tokens)), to_numpy(std::move(framed.offsets)),
            to_numpy(std::move(framed.marked))};
}

template <typename Stored, typename Id>
void def_frame(py::module_& m, const char* name) {
    m.def(name, &py_frame_documents<Stored, Id>, py::arg("ids").noconvert(),
          py::arg("offsets").noconvert(), py::arg("prefix"), py::arg("suffix"),
          py::arg("vocab_size"), py::arg("marks").noconvert());
}

}  // namespace

void register_tokenization(py::module_& m) {
    m.def("extract_jsonl", &py_extract_jsonl, py::arg("buffer").noconvert(), py::arg("key"),
          py::arg("values") = "strings");
    m.def("valid_utf8", per_document(valid_utf8), py::arg("text").noconvert(),
          py::arg("offsets").noconvert());
    m.def("count_words", per_document(count_words), py::arg("text").noconvert(),
          py::arg("offsets").noconvert());
    m.def("has_characters", &py_has_characters, py::arg("text").noconvert(),
          py::arg("offsets").noconvert(), py::arg("ranges").noconvert());
    // Two overloads per name; pybind11 selects by the dtype of ids.
    def_frame<std::uint16_t, std::uint32_t>(m, "frame_documents_uint16");
    def_frame<std::uint16_t, std::int32_t>(m, "frame_documents_uint16");
    def_frame<std::int32_t, std::uint32_t>(m, "frame_documents_int32");
    def_frame<std::int32_t, std::int32_t>(m, "frame_documents_int32");
}

}  // namespace megapack
