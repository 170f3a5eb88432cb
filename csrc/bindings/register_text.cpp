// text: JSON lines, UTF-8 and token ids in, checked; arrays out.
#include "bindings/scalars.hpp"
#include "core/text/document_text.hpp"
#include "core/text/frame.hpp"
#include "core/text/jsonl.hpp"

namespace megapack {
namespace {

py::tuple py_extract_jsonl(const Array<std::uint8_t>& buffer, const py::object& key,
                           const py::object& values) {
    const auto bytes = view(buffer, "buffer");
    const std::string name = text(key, "key");
    const auto wanted = choice<JsonValues>(values, "values",
                                           {{"strings", JsonValues::strings},
                                            {"scalars", JsonValues::scalars},
                                            {"lists", JsonValues::lists},
                                            {"any", JsonValues::any}});
    JsonlTexts texts = unlocked([&] { return extract_jsonl(bytes, name, wanted); });
    return py::make_tuple(to_numpy(std::move(texts.text)), to_numpy(std::move(texts.offsets)),
                          to_numpy(std::move(texts.status)), to_numpy(std::move(texts.line_begin)));
}

template <typename Stored, typename Id>
py::tuple py_frame_documents(const Array<Id>& ids, const Array<std::int64_t>& offsets,
                             const py::object& prefix, const py::object& suffix,
                             const py::object& vocab_size) {
    const auto id_view = view(ids, "ids");
    const auto bounds = view(offsets, "offsets");
    const std::vector<std::int64_t> before = integer_list(prefix, "prefix");
    const std::vector<std::int64_t> behind = integer_list(suffix, "suffix");
    const std::int64_t size = integer(vocab_size, "vocab_size");
    FramedDocuments<Stored> framed = unlocked([&] {
        return frame_documents<Stored>(id_view, bounds, Span<const std::int64_t>(before),
                                       Span<const std::int64_t>(behind), size);
    });
    return py::make_tuple(to_numpy(std::move(framed.tokens)), to_numpy(std::move(framed.offsets)),
                          framed.max_token);
}

template <typename Stored, typename Id>
void def_frame(py::module_& m, const char* name) {
    m.def(name, &py_frame_documents<Stored, Id>, py::arg("ids").noconvert(),
          py::arg("offsets").noconvert(), py::arg("prefix"), py::arg("suffix"),
          py::arg("vocab_size"));
}

}  // namespace

void register_text(py::module_& m) {
    m.def("extract_jsonl", &py_extract_jsonl, py::arg("buffer").noconvert(), py::arg("key"),
          py::arg("values") = "strings");
    using Bytes = Array<std::uint8_t>;
    using Numbers = Array<std::int64_t>;
    const auto text_arg = py::arg("text").noconvert(), offsets = py::arg("offsets").noconvert();
    m.def(
        "valid_utf8",
        [](const Bytes& text, const Numbers& offsets) {
            const auto bytes = view(text, "text");
            const auto bounds = view(offsets, "offsets");
            return computed([&] { return valid_utf8(bytes, bounds); });
        },
        text_arg, offsets);
    m.def(
        "count_words",
        [](const Bytes& text, const Numbers& offsets) {
            const auto bytes = view(text, "text");
            const auto bounds = view(offsets, "offsets");
            return computed([&] { return count_words(bytes, bounds); });
        },
        text_arg, offsets);
    m.def(
        "has_characters",
        [](const Bytes& text, const Numbers& offsets, const Numbers& ranges) {
            const auto bytes = view(text, "text");
            const auto bounds = view(offsets, "offsets"), pairs = view(ranges, "ranges");
            return computed([&] { return has_characters(bytes, bounds, pairs); });
        },
        text_arg, offsets, py::arg("ranges").noconvert());
    // One name; pybind11 picks the overload by the dtype of ids.
    def_frame<std::uint16_t, std::uint32_t>(m, "frame_documents_uint16");
    def_frame<std::uint16_t, std::int32_t>(m, "frame_documents_uint16");
    def_frame<std::int32_t, std::uint32_t>(m, "frame_documents_int32");
    def_frame<std::int32_t, std::int32_t>(m, "frame_documents_int32");
}

}  // namespace megapack
