#include "core/storage/mmididx.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace megapack {
namespace {

constexpr char kMagic[] = "MMIDIDX\0";  // nine bytes with the terminating zero
constexpr std::uint64_t kVersion = 1;
constexpr std::int64_t kBlock = 4096;

static_assert(sizeof(kMagic) == 9, "the magic is nine bytes");

template <typename T>
T load(const std::uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <typename T>
void copy_out(const std::uint8_t* from, std::int64_t count, Span<T> out) {
    check(out.size() == count, "out has ", out.size(), " elements; it must have ", count);
    if (count > 0) std::memcpy(out.data(), from, count * sizeof(T));
}

// Returns bytes as text with '.' for unprintable ones, to show a wrong magic in a message.
std::string printable(Span<const std::uint8_t> bytes) {
    std::string text;
    for (const std::uint8_t c : bytes) text += c >= 32 && c < 127 ? static_cast<char>(c) : '.';
    return text;
}

[[noreturn]] void bad_length(const IndexView& index, std::int64_t sequence) {
    throw FormatError(concat_message(index.name(), ": sequence ", sequence, " has length ",
                                     index.length(sequence), "; lengths cannot be negative"));
}

// Returns the byte after a sequence.
std::int64_t end_of_sequence(const IndexView& index, std::int64_t sequence, std::int64_t itemsize) {
    const std::int32_t length = index.length(sequence);
    if (length < 0) bad_length(index, sequence);
    std::int64_t end = index.pointer(sequence);
    const std::int64_t bytes = length * itemsize;
    check<FormatError>(end >= 0 && !__builtin_add_overflow(end, bytes, &end), index.name(),
                       ": sequence ", sequence, " points at byte ", index.pointer(sequence),
                       "; `megapack-build repair` recomputes pointers");
    return end;
}

// Returns the number of tokens in sequences [begin, end).
std::int64_t sum_lengths(const IndexView& index, std::int64_t begin, std::int64_t end) {
    std::int64_t sum = 0;
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int32_t length = index.length(i);
        if (length < 0) bad_length(index, i);
        sum += length;
    }
    return sum;
}

template <typename T>
bool fill_document_lengths(const IndexView& index, Span<T> out) {
    check(out.size() == index.num_documents(), "out has ", out.size(), " elements; it must have ",
          index.num_documents());
    check_document_indices(index);
    for (std::int64_t d = 0; d < out.size(); ++d) {
        const std::int64_t begin = index.document_index(d);
        const std::int64_t end = index.document_index(d + 1);
        const std::int64_t length = sum_lengths(index, begin, end);
        if (length > std::numeric_limits<T>::max()) return false;
        out[d] = static_cast<T>(length);
    }
    return true;
}

}  // namespace

IndexHeader parse_index_header(Span<const std::uint8_t> bytes, std::int64_t file_bytes,
                               const std::string& name) {
    const std::int64_t magic_bytes = std::min<std::int64_t>(bytes.size(), sizeof(kMagic));
    check<FormatError>(std::equal(bytes.begin(), bytes.begin() + magic_bytes, kMagic), name,
                       " is not a Megatron index: it begins with '",
                       printable(bytes.subspan(0, magic_bytes)), "' instead of 'MMIDIDX'");
    check<FormatError>(bytes.size() >= kIndexHeaderBytes && file_bytes >= kIndexHeaderBytes, name,
                       " is truncated: it has ", file_bytes, " bytes; the header alone takes ",
                       kIndexHeaderBytes);
    const auto version = load<std::uint64_t>(bytes.data() + 9);
    check<FormatError>(version == kVersion, name, " has version ", version,
                       "; this reader knows version ", kVersion);
    const auto sequences = load<std::uint64_t>(bytes.data() + 18);
    const auto document_indices = load<std::uint64_t>(bytes.data() + 26);
    const auto room = static_cast<std::uint64_t>(file_bytes - kIndexHeaderBytes);
    const bool fits = sequences <= room / 12 && document_indices <= (room - 12 * sequences) / 8;
    check<FormatError>(fits, name, " is truncated: its header promises ", sequences,
                       " sequences and ", document_indices, " document indices, which ", file_bytes,
                       " bytes cannot hold");
    return {bytes[17], static_cast<std::int64_t>(sequences),
            static_cast<std::int64_t>(document_indices)};
}

IndexView::IndexView(Span<const std::uint8_t> bytes, std::string name, const BlockChecks* checks)
    : bytes_(bytes),
      checks_(checks),
      name_(std::move(name)),
      header_(parse_index_header(bytes, bytes.size(), name_)) {}

std::int32_t IndexView::length(std::int64_t sequence) const {
    return load<std::int32_t>(at(header_.lengths_at() + 4 * sequence));
}

std::int64_t IndexView::pointer(std::int64_t sequence) const {
    return load<std::int64_t>(at(header_.pointers_at() + 8 * sequence));
}

std::int64_t IndexView::document_index(std::int64_t i) const {
    if (header_.lacks_document_indices()) return i;
    return load<std::int64_t>(at(header_.document_indices_at() + 8 * i));
}

void copy_sequence_lengths(const IndexView& index, Span<std::int32_t> out) {
    copy_out(index.at(index.header().lengths_at()), index.num_sequences(), out);
}

void copy_sequence_pointers(const IndexView& index, Span<std::int64_t> out) {
    copy_out(index.at(index.header().pointers_at()), index.num_sequences(), out);
}

void copy_document_indices(const IndexView& index, Span<std::int64_t> out) {
    if (!index.header().lacks_document_indices()) {
        copy_out(index.at(index.header().document_indices_at()), index.num_documents() + 1, out);
        return;
    }
    check(out.size() == index.num_documents() + 1, "out has ", out.size(),
          " elements; it must have ", index.num_documents() + 1);
    std::iota(out.begin(), out.end(), std::int64_t{0});
}

std::pair<std::int64_t, std::int64_t> check_sequences(const IndexView& index, std::int64_t first,
                                                      std::int64_t last, std::int64_t itemsize) {
    const std::int64_t begin = first == 0 ? 0 : end_of_sequence(index, first - 1, itemsize);
    check<FormatError>(begin % itemsize == 0, index.name(), ": sequence ", first,
                       " begins at byte ", begin, ", inside a token of ", itemsize,
                       " bytes; `megapack-build repair` recomputes pointers");
    std::int64_t end = begin;
    for (std::int64_t i = first; i <= last && i < index.num_sequences(); ++i) {
        check<FormatError>(index.pointer(i) == end, index.name(), ": sequence ", i,
                           " points at byte ", index.pointer(i),
                           ", but the sequences before it end at ", end,
                           "; `megapack-build repair` recomputes pointers");
        if (i < last) end = end_of_sequence(index, i, itemsize);
    }
    return {begin, end};
}

void check_document_indices(const IndexView& index) {
    const std::int64_t num_sequences = index.num_sequences();
    const std::int64_t last = index.document_index(index.num_documents());
    check<FormatError>(last == num_sequences, index.name(), ": document_indices end at ", last,
                       " instead of the number of sequences, ", num_sequences,
                       "; `megapack-build repair` restores document_indices that a merge lost");
    std::int64_t previous = 0;
    for (std::int64_t i = 0; i <= index.num_documents(); ++i) {
        const std::int64_t value = index.document_index(i);
        const bool in_order = i == 0 ? value == 0 : value >= previous;
        check<FormatError>(in_order, index.name(), ": document_indices[", i, "] is ", value,
                           "; they begin at 0 and never go back (previous: ", previous, ")");
        previous = value;
    }
}

bool is_one_sequence_per_document(const IndexView& index) {
    if (index.header().lacks_document_indices()) return true;
    if (index.num_documents() != index.num_sequences()) return false;
    const std::uint8_t* from = index.at(index.header().document_indices_at());
    for (std::int64_t begin = 0; begin <= index.num_sequences(); begin += kBlock) {
        const std::int64_t end = std::min(begin + kBlock, index.num_sequences() + 1);
        std::uint64_t difference = 0;
        for (std::int64_t i = begin; i < end; ++i)
            difference |= load<std::uint64_t>(from + 8 * i) ^ i;
        if (difference != 0) return false;
    }
    return true;
}

bool document_lengths(const IndexView& index, Span<std::int32_t> out) {
    if (!is_one_sequence_per_document(index)) return fill_document_lengths(index, out);
    copy_sequence_lengths(index, out);
    std::int32_t sign = 0;
    for (const std::int32_t length : out) sign |= length;
    if (sign < 0) sum_lengths(index, 0, index.num_sequences());  // throws, naming the sequence
    return true;
}

void document_lengths(const IndexView& index, Span<std::int64_t> out) {
    fill_document_lengths(index, out);
}

void document_offsets(const IndexView& index, std::int64_t itemsize, Span<std::int64_t> out) {
    check(out.size() == index.num_documents() + 1, "out has ", out.size(),
          " elements; it must have ", index.num_documents() + 1);
    check_document_indices(index);
    check_sequences(index, 0, index.num_sequences(), itemsize);
    const std::int64_t num_sequences = index.num_sequences();
    std::int64_t total = 0;
    if (num_sequences > 0)
        total = index.pointer(num_sequences - 1) / itemsize + index.length(num_sequences - 1);
    for (std::int64_t d = 0; d < out.size(); ++d) {
        const std::int64_t sequence = index.document_index(d);
        out[d] = sequence == num_sequences ? total : index.pointer(sequence) / itemsize;
    }
}

std::int64_t scan_lengths(Span<const std::int32_t> lengths, std::int64_t itemsize,
                          std::int64_t begin, Span<std::int64_t> out) {
    check(out.size() == lengths.size(), "out has ", out.size(), " elements; it must have ",
          lengths.size());
    for (std::int64_t i = 0; i < lengths.size(); ++i) {
        check<FormatError>(lengths[i] >= 0, "a sequence has length ", lengths[i],
                           "; lengths cannot be negative");
        out[i] = begin;
        check<DataError>(!__builtin_add_overflow(begin, lengths[i] * itemsize, &begin),
                         "the sequences end past byte 2^63");
    }
    return begin;
}

std::int64_t shift_document_ends(Span<const std::int64_t> ends, std::int64_t num_sequences,
                                 std::int64_t previous, std::int64_t begin,
                                 Span<std::int64_t> out) {
    check(out.size() == ends.size(), "out has ", out.size(), " elements; it must have ",
          ends.size());
    for (std::int64_t i = 0; i < ends.size(); ++i) {
        check<FormatError>(ends[i] >= previous && ends[i] <= num_sequences,
                           "a document ends at sequence ", ends[i], "; the one before it ended at ",
                           previous, " and there are ", num_sequences, " sequences");
        previous = ends[i];
        check<DataError>(!__builtin_add_overflow(begin, ends[i], &out[i]),
                         "there are more than 2^63 sequences");
    }
    return previous;
}

}  // namespace megapack
