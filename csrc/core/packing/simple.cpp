// Strategies without a plan of bins: streams (concat, bucket_naive), atoms of streams and documents
// (concat, pad), next fit (next_fit, length_sorted), binary digits (decompose).
#include <limits>
#include <type_traits>

#include "core/packing/sort.hpp"
#include "core/packing/stream.hpp"

namespace megapack {
namespace {

// ---- Streams: the documents of a bucket joined in order and cut at its capacity; the last sample
// may be short

std::int64_t smallest_that_holds(const std::vector<std::int64_t>& capacities, std::int64_t length) {
    std::int64_t b = 0;  // without a branch, which would be mispredicted; there are few buckets
    for (std::int64_t i = 0; i + 1 < ssize(capacities); ++i) b += capacities[i] < length ? 1 : 0;
    return b;
}

// Calls visit(bucket, item) for every document of a part.
template <typename Id, typename Length, typename Visit>
void for_each_document(const Documents<Id, Length>& documents,
                       const std::vector<std::int64_t>& capacities, Part range, Visit visit) {
    for (std::int64_t i = range.begin; i < range.end; ++i) {
        const Item<Id, Length> item = documents[i];
        visit(smallest_that_holds(capacities, item.length), item);
    }
}

// Packs one bucket. A single thread needs no other pass: a part begins where the part before it
// ended, and every cut splits at most one document, which bounds the number of segments.
template <typename Id, typename Length>
Samples<Id, Length> pack_one_stream(const Documents<Id, Length>& documents, std::int64_t capacity,
                                    std::int64_t tokens, const Run& run) {
    const std::int64_t n = documents.size(), parts = num_parts(n);
    const std::int64_t samples = (tokens + capacity - 1) / capacity;
    Samples<Id, Length> out({capacity}, {0, samples}, n + samples);
    out.open_sample(0, 0);
    if (run.threads == 1) {
        run.progress.add_total(n);
        StreamCutter<Id, Length> cutter(out, capacity, 0, 0, 0);
        for_each_part(
            run, n, [&](std::int64_t, Part range) { cutter.push_range(documents, range, tokens); });
        out.truncate(samples, cutter.num_segments());
        return out;
    }
    run.progress.add_total(3 * n);
    std::vector<std::int64_t> position(parts + 1, 0), segment(parts + 1, 0);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        const Documents<Id, Length> items = documents;
        std::uint64_t sum = 0;  // lengths are not negative: unsigned numbers widen faster
        for (std::int64_t i = range.begin; i < range.end; ++i)
            sum += std::make_unsigned_t<Length>(items[i].length);
        position[p] = static_cast<std::int64_t>(sum);
    });
    lay_out(position);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        const Documents<Id, Length> items = documents;
        SegmentCounter counter(capacity, position[p]);
        for (std::int64_t i = range.begin; i < range.end; ++i) counter.push(items[i].length);
        segment[p] = counter.num_segments();
    });
    lay_out(segment);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        StreamCutter<Id, Length> cutter(out, capacity, 0, segment[p], position[p]);
        cutter.push_range(documents, range, position[p + 1]);
    });
    out.truncate(samples, segment[parts]);
    return out;
}

// Packs a stream per bucket; a document goes to the smallest bucket that holds it, or the largest.
template <typename Id, typename Length>
Samples<Id, Length> pack_many_streams(const Documents<Id, Length>& documents,
                                      const std::vector<std::int64_t>& capacities, const Run& run) {
    const std::int64_t n = documents.size(), buckets = ssize(capacities);
    run.progress.add_total(3 * n);
    // Start of each part: token position in every stream, first segment in every stream.
    std::vector<std::vector<std::int64_t>> position(num_parts(n)), segment(num_parts(n));
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        position[p].assign(buckets, 0);
        for_each_document(documents, capacities, range,
                          [&](std::int64_t b, auto item) { position[p][b] += item.length; });
    });
    const std::vector<std::int64_t> token_begin = lay_out(position, buckets);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        std::vector<SegmentCounter> counters;
        for (std::int64_t b = 0; b < buckets; ++b)
            counters.emplace_back(capacities[b], position[p][b] -= token_begin[b]);
        for_each_document(documents, capacities, range,
                          [&](std::int64_t b, auto item) { counters[b].push(item.length); });
        for (const SegmentCounter& counter : counters) segment[p].push_back(counter.num_segments());
    });
    const std::vector<std::int64_t> segment_begin = lay_out(segment, buckets);

    std::vector<std::int64_t> first{0};
    for (std::int64_t b = 0; b < buckets; ++b) {
        const std::int64_t tokens = token_begin[b + 1] - token_begin[b];
        first.push_back(first[b] + (tokens + capacities[b] - 1) / capacities[b]);
    }
    Samples<Id, Length> out(capacities, first, segment_begin[buckets]);
    for (std::int64_t b = 0; b < buckets; ++b) out.open_sample(first[b], segment_begin[b]);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        std::vector<StreamCutter<Id, Length>> cutters;
        for (std::int64_t b = 0; b < buckets; ++b)
            cutters.emplace_back(out, capacities[b], first[b], segment[p][b], position[p][b]);
        for_each_document(documents, capacities, range, [&](std::int64_t b, auto item) {
            cutters[b].push(item.document, 0, item.length);
        });
    });
    return out;
}

// ---- Atoms of a stream or of documents, in seeded order

// Joins units (a sample each in `units`) into samples of the capacity. Atom a consists of
// units_of[a] units; the first `num_shuffled` atoms are taken in seeded order (Purpose::kAtoms).
template <typename Id, typename Length>
Samples<Id, Length> reorder_atoms(const Samples<Id, Length>& units,
                                  const std::vector<std::int32_t>& units_of,
                                  std::int64_t num_shuffled, const AtomSize& sizes,
                                  const Run& run) {
    const Span<const std::int32_t> shuffled{units_of.data(), num_shuffled};
    const auto order =
        shuffle<std::int64_t>(shuffled, random_for(run.seed, Purpose::kAtoms), run.threads);
    std::vector<std::int64_t> first_unit(units_of.begin(), units_of.end());
    lay_out(first_unit);

    const std::int64_t merge = sizes.capacity / sizes.unit(), count = units.num_samples();
    Samples<Id, Length> out({sizes.capacity}, {0, (count + merge - 1) / merge},
                            units.segment_length.size());
    std::int64_t unit = 0, at = 0;
    for (std::int64_t a = 0; a < ssize(units_of); ++a) {
        const std::int64_t atom = a < num_shuffled ? order[a].document : a;
        const std::int64_t first = first_unit[atom];
        for (std::int64_t u = first; u < first + units_of[atom]; ++u) {
            if (unit % merge == 0) out.open_sample(unit / merge, at);
            ++unit;
            const std::int64_t end = units.sample_segment_offsets[u + 1];
            for (std::int64_t s = units.sample_segment_offsets[u]; s < end; ++s)
                out.put(at++, units.segment_document[s], units.segment_begin[s],
                        units.segment_length[s]);
        }
    }
    return out;
}

// Shuffles the atoms of a stream that is cut into units.
template <typename Id, typename Length>
Samples<Id, Length> shuffle_atoms(const Samples<Id, Length>& stream, const AtomSize& sizes,
                                  const Run& run) {
    const std::int64_t per_atom = sizes.atom_size / sizes.unit();
    std::int64_t tokens = 0;
    for (const std::int32_t length : Span<const std::int32_t>(stream.segment_length))
        tokens += length;
    const std::int64_t full = tokens / sizes.atom_size;
    std::vector<std::int32_t> units(full, static_cast<std::int32_t>(per_atom));
    const std::int64_t partial = stream.num_samples() - full * per_atom;
    if (partial > 0) units.push_back(static_cast<std::int32_t>(partial));
    return reorder_atoms(stream, units, full, sizes, run);
}

// Cuts every document into units, one sample each, in document order.
template <typename Id, typename Length>
Samples<Id, Length> cut_in_units(const Documents<Id, Length>& documents, std::int64_t unit,
                                 const Run& run) {
    const std::int64_t n = documents.size();
    run.progress.add_total(2 * n);
    std::vector<std::int64_t> next(num_parts(n), 0);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i)
            next[p] += (documents[i].length + unit - 1) / unit;
    });
    const std::int64_t units = lay_out(next);
    Samples<Id, Length> out({unit}, {0, units}, units);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            for (std::int64_t begin = 0; begin < item.length; begin += unit, ++next[p]) {
                out.put_alone(next[p], item.document, static_cast<Length>(begin),
                              std::min(item.length - begin, unit));
            }
        }
    });
    return out;
}

// ---- Next fit

// Fills samples one by one, from `sample` and `segment` of `out` on.
template <typename Id, typename Length>
class NextFit {
  public:
    NextFit(const Samples<Id, Length>& out, std::int64_t capacity, std::int64_t sample,
            std::int64_t segment)
        : out_(out), capacity_(capacity), sample_(sample), segment_(segment) {}

    void push(Id document, Length begin, std::int64_t length) {
        if (length > room_) {
            out_.open_sample(sample_++, segment_);
            room_ = capacity_;
        }
        out_.put(segment_++, document, begin, length);
        room_ -= length;
    }
    std::int64_t num_samples() const { return sample_; }
    std::int64_t num_segments() const { return segment_; }

  private:
    const Samples<Id, Length>& out_;
    std::int64_t capacity_, sample_, segment_, room_ = 0;
};

template <typename Id, typename Length>
Samples<Id, Length> pack_documents(const Documents<Id, Length>& documents, std::int64_t capacity,
                                   const Run& run) {
    const std::int64_t n = documents.size();
    run.progress.add_total(n);
    std::int64_t chunks = 0, rests = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t length = documents[i].length;
        if (length >= capacity) chunks += length / capacity;
        rests += length < capacity ? length > 0 : length % capacity > 0;
    }
    Samples<Id, Length> out({capacity}, {0, chunks + rests}, chunks + rests);
    NextFit<Id, Length> open(out, capacity, chunks, chunks);
    std::int64_t chunk = 0;
    // Always one thread: each sample depends on the one before.
    for_each_part(Run(run.seed, 1, run.progress), n, [&](std::int64_t, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            std::int64_t begin = 0, length = item.length;
            for (; length >= capacity; begin += capacity, length -= capacity)
                out.put_alone(chunk++, item.document, static_cast<Length>(begin), capacity);
            if (length > 0) open.push(item.document, static_cast<Length>(begin), length);
        }
    });
    out.truncate(open.num_samples(), open.num_segments());
    return out;
}

// ---- Binary digits

void check_powers_of_two(const std::vector<std::int64_t>& capacities) {
    check_capacities(capacities);
    check((capacities[0] & (capacities[0] - 1)) == 0, "bucket ", capacities[0],
          " is not a power of two");
    for (std::int64_t b = 1; b < ssize(capacities); ++b)
        check(capacities[b] == 2 * capacities[b - 1], "bucket ", capacities[b], " follows ",
              capacities[b - 1],
              "; buckets are all powers of two from the smallest to the largest");
}

// Calls visit(bucket, number of pieces) for the digits of a length, largest first; returns the
// dropped tokens.
template <typename Visit>
std::int64_t for_each_digit(std::int64_t length, const std::vector<std::int64_t>& capacities,
                            Visit visit) {
    std::int64_t b = ssize(capacities) - 1;
    const std::int64_t repeats = length / capacities[b];
    if (repeats > 0) visit(b, repeats);
    length %= capacities[b];
    while (length >= capacities[0]) {
        --b;
        if (length < capacities[b]) continue;
        visit(b, std::int64_t{1});
        length -= capacities[b];
    }
    return length;
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_pad(const Lengths<Length>& lengths, const PadRules& rules,
                             const Run& run) {
    const AtomSize& sizes = rules.sizes;
    sizes.check_sizes();
    const Documents<Id, Length> documents = in_file_order<Id>(lengths);
    Samples<Id, Length> units = cut_in_units(documents, sizes.unit(), run);
    if (sizes.atom_size == sizes.capacity) return units;
    std::vector<std::int32_t> units_of;
    if (sizes.atom_size < sizes.capacity) {
        units_of.assign(units.num_samples(), 1);
    } else {
        for (std::int64_t i = 0; i < documents.size(); ++i)
            for (std::int64_t length = documents[i].length; length > 0; length -= sizes.atom_size) {
                const std::int64_t tokens = std::min(length, sizes.atom_size);
                units_of.push_back(
                    static_cast<std::int32_t>((tokens + sizes.capacity - 1) / sizes.capacity));
            }
    }
    return reorder_atoms(units, units_of, ssize(units_of), sizes, run);
}

template <typename Id, typename Length>
Samples<Id, Length> pack_concat(const Lengths<Length>& lengths, const ConcatRules& rules,
                                const Run& run) {
    const AtomSize& sizes = rules.sizes;
    sizes.check_sizes();
    return pack_in_order<Id>(lengths, rules.shuffle, run, [&](const auto& documents) {
        auto samples = pack_one_stream(documents, sizes.unit(), lengths.totals().num_tokens, run);
        if (sizes.atom_size != sizes.capacity) samples = shuffle_atoms(samples, sizes, run);
        if (rules.drop_last) samples.drop_partial_sample();
        return samples;
    });
}

template <typename Id, typename Length>
Samples<Id, Length> pack_bucket_naive(const Lengths<Length>& lengths, const BucketNaiveRules& rules,
                                      const Run& run) {
    check_capacities(rules.capacities);
    return pack_in_order<Id>(lengths, rules.shuffle, run, [&](const auto& documents) {
        return rules.capacities.size() == 1 ? pack_one_stream(documents, rules.capacities[0],
                                                              lengths.totals().num_tokens, run)
                                            : pack_many_streams(documents, rules.capacities, run);
    });
}

template <typename Id, typename Length>
Samples<Id, Length> pack_next_fit(const Lengths<Length>& lengths, const NextFitRules& rules,
                                  const Run& run) {
    check_capacity(rules.capacity);
    return pack_in_order<Id>(lengths, rules.shuffle, run, [&](const auto& documents) {
        return pack_documents(documents, rules.capacity, run);
    });
}

template <typename Id, typename Length>
Samples<Id, Length> pack_length_sorted(const Lengths<Length>& lengths,
                                       const LengthSortedRules& rules, const Run& run) {
    const std::int64_t capacity = rules.capacity;
    check_capacity(capacity);
    const Documents<Id, Length> documents = in_file_order<Id>(lengths);
    run.progress.add_total(2 * documents.size());
    LengthSort<Id, Length> sort(documents, PlainCut{capacity}, run.threads);
    const std::int64_t chunks = sort.num_chunks(), rests = sort.num_rests();
    Samples<Id, Length> out({capacity}, {0, chunks + rests}, chunks + rests);
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.put_alone(chunk, document, begin, capacity);
    });
    run.progress.advance(documents.size());
    NextFit<Id, Length> open(out, capacity, chunks, chunks);
    std::int64_t at = 0;
    for (std::int64_t length = 1; length < ssize(sort.counts()); ++length) {
        for (std::int64_t k = 0; k < sort.counts()[length]; ++k) {
            const Rest<Id, Length> rest(sorted.ids[at++], length, documents.lengths);
            open.push(rest.document, rest.begin, length);
        }
    }
    out.truncate(open.num_samples(), open.num_segments());
    run.progress.advance(documents.size());
    return out;
}

template <typename Id, typename Length>
Samples<Id, Length> pack_decompose(const Lengths<Length>& lengths, const DecomposeRules& rules,
                                   const Run& run) {
    const std::vector<std::int64_t>& capacities = rules.capacities;
    check_powers_of_two(capacities);
    const Documents<Id, Length> documents = in_file_order<Id>(lengths);
    const std::int64_t n = documents.size(), buckets = ssize(capacities);
    run.progress.add_total(2 * n);
    std::vector<std::vector<std::int64_t>> next(num_parts(n));
    std::vector<std::int64_t> dropped(num_parts(n), 0);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        next[p].assign(buckets, 0);
        for (std::int64_t i = range.begin; i < range.end; ++i)
            dropped[p] +=
                for_each_digit(documents[i].length, capacities,
                               [&](std::int64_t b, std::int64_t pieces) { next[p][b] += pieces; });
    });
    const std::vector<std::int64_t> begins = lay_out(next, buckets);
    Samples<Id, Length> out(capacities, begins, begins[buckets]);
    out.dropped_tokens = lay_out(dropped);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            std::int64_t begin = 0;
            for_each_digit(item.length, capacities, [&](std::int64_t b, std::int64_t pieces) {
                for (; pieces > 0; --pieces, begin += capacities[b])
                    out.put_alone(next[p][b]++, item.document, static_cast<Length>(begin),
                                  capacities[b]);
            });
        }
    });
    return out;
}

MEGAPACK_INSTANTIATE_STRATEGY(pad, PadRules);
MEGAPACK_INSTANTIATE_STRATEGY(concat, ConcatRules);
MEGAPACK_INSTANTIATE_STRATEGY(bucket_naive, BucketNaiveRules);
MEGAPACK_INSTANTIATE_STRATEGY(next_fit, NextFitRules);
MEGAPACK_INSTANTIATE_STRATEGY(length_sorted, LengthSortedRules);
MEGAPACK_INSTANTIATE_STRATEGY(decompose, DecomposeRules);

}  // namespace megapack
