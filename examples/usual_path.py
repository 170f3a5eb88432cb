"""The usual path in one file: lengths -> samples -> a step -> a rank's micro batches -> tensors.

Start reading here: plain Python, no options, one source, strategy ``bucket``, default schedule, at
most 1,024 samples per bucket. tests/test_usual_path.py checks that megapack returns the same.
"""

from itertools import islice, pairwise

Sample = list[tuple[int, int, int]]  # segments: document, begin, length
Buckets = dict[int, list[Sample]]  # capacity in tokens -> samples of at most so many tokens


# Packing: lengths -> samples (megapack.pack, csrc/core/packing/bucket.cpp)
def pack_bucket(lengths: list[int], capacities: list[int]) -> Buckets:
    """Cut only documents longer than the largest capacity; fill samples with what remains."""
    most = capacities[-1]
    chunks = [[(d, i * most, most)] for d, n in enumerate(lengths) for i in range(n // most)]
    rests = [(d, n - n % most, n % most) for d, n in enumerate(lengths) if n % most]
    options = [fill_samples(rests, capacities, effort) for effort in range(3)]
    used = sum(length for _, _, length in rests)
    padding = [sum(c * len(buckets[c]) for c in buckets) - used for buckets in options]
    enough = next((i for i in range(3) if 999 * padding[i] <= used), padding.index(min(padding)))
    return {**options[enough], most: chunks + options[enough][most]}


def fill_samples(rests: Sample, capacities: list[int], effort: int) -> Buckets:
    """Open a sample with the longest document; add the longest that fits until none does."""
    buckets: Buckets = {capacity: [] for capacity in capacities}
    pool = sorted(rests, key=lambda segment: -segment[2])  # equal lengths stay in file order
    while pool:
        shortest, capacity, sample = pool[-1][2], min(c for c in capacities if c >= pool[0][2]), []
        while pool:
            space = capacity - sum(length for _, _, length in sample)
            fits = [s for s in pool if s[2] <= space]
            best = [s for s in fits if effort < 2 or not sample or not 0 < space - s[2] < shortest]
            larger = [c for c in capacities if c - capacity + space >= pool[-1][2]]  # fit one more
            if fits:
                sample.append(pool.pop(pool.index((best or fits)[0])))
            elif effort > 0 and larger and 20 * space > capacity:  # 5 % of padding
                capacity = larger[0]
            else:
                break
        buckets[capacity].append(sorted(sample, key=lambda segment: -segment[2]))
    return buckets


# Steps: step -> samples (megapack.data.Schedule: steps.py, bucket_streams.py)
def step_samples(buckets: Buckets, step_tokens: int, seed: int, step: int):
    """Return the bucket's capacity and the samples of a step: the next ones of that bucket."""
    *before, capacity = islice(capacity_order(buckets, step_tokens, seed), step + 1)
    samples, count, taken = buckets[capacity], step_tokens // capacity, []
    for position in range(before.count(capacity) * count, (before.count(capacity) + 1) * count):
        epoch, place = divmod(position, len(samples))
        order = list(range(len(samples)))  # shuffled anew in every epoch (Fisher and Yates)
        key = random_bits(seed, 1, capacity, 0, epoch)  # 1: shuffles, 0: the first source
        for i in range(len(order), 1, -1):
            j = random_bits(key, i) % i
            order[i - 1], order[j] = order[j], order[i - 1]
        taken.append(samples[order[place]])
    return capacity, taken


def capacity_order(buckets: Buckets, step_tokens: int, seed: int):
    """Yield the capacity of every step. An epoch draws every bucket until its samples are used."""
    for epoch in range(2**62):
        times = []
        for b, capacity in enumerate(c for c in buckets if buckets[c]):
            size, per_step = len(buckets[capacity]), step_tokens // capacity
            first, end = (-(-e * size // per_step) for e in (epoch, epoch + 1))
            for i in range(end - first):  # spread evenly: one step in each part of the epoch
                chance = (random_bits(seed, 2, epoch, b, i) >> 11) / 2**53
                times.append(((i + chance) / (end - first), b, capacity))
        order = [capacity for _, _, capacity in sorted(times)]
        if epoch == 0:  # the largest bucket comes first: running out of memory shows at once
            at = order.index(max(order))
            order[0], order[at] = order[at], order[0]
        yield from order


def random_bits(key: int, *counters: int) -> int:
    """Return 64 bits that depend on key and counters only, so any step can be computed alone."""
    for counter in counters:
        key = mix(key ^ mix(counter))
    return key


def mix(x: int) -> int:
    """Return the next number of SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


# One rank: samples -> micro batches (megapack/data/sampler.py, csrc/core/schedule/deal.cpp)
def micro_batches(capacity: int, samples: list[Sample], rank: int, num_ranks: int, tokens: int):
    """Return the samples of each micro batch of a rank. All ranks get equal attention work."""
    lengths = [[length for _, _, length in sample] for sample in samples]
    work = [sum(n * n for n in [*own, capacity - sum(own)]) for own in lengths]  # with padding
    own = assign(work, num_ranks)[rank]
    groups = assign([work[i] for i in own], len(own) * capacity // tokens)
    groups.sort(key=lambda group: -sum(work[own[i]] for i in group))  # the costliest comes first
    return [[samples[own[i]] for i in group] for group in groups]


def assign(work: list[int], num_bins: int) -> list[list[int]]:
    """Assign equally many items to every bin: the costliest first, to the least loaded bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(range(len(work)), key=lambda i: -work[i]):
        unfilled = [items for items in bins if len(items) < len(work) // num_bins]
        min(unfilled, key=lambda items: sum(work[i] for i in items)).append(item)
    for _ in range(64):  # then exchange an item of the fullest bin while that lowers its load
        loads = [sum(work[i] for i in items) for items in bins]
        full = loads.index(max(loads))
        pairs = [
            (max(loads[full] - work[x] + work[y], loads[b] + work[x] - work[y]), b, i, j)
            for b in range(num_bins)
            for i, x in enumerate(bins[full])
            for j, y in enumerate(bins[b])
        ]
        load, b, i, j = min(pairs)
        if loads[full] <= 1.001 * sum(work) / num_bins or load >= loads[full]:
            break
        bins[full][i], bins[b][j] = bins[b][j], bins[full][i]
    return [sorted(items, key=lambda i: (-work[i], i)) for items in bins]


# Tensors: one stream per micro batch (megapack.data.PackedDataset, csrc/core/gather)
def tensors(documents: list[list[int]], capacity: int, samples: list[Sample]):
    """Return the tensors of a micro batch. Position 0 and cu_seqlens begin at every segment."""
    tokens, labels, positions, bounds = [], [], [], [0]
    for sample in samples:
        segments = [(documents[d][begin : begin + n + 1], n) for d, begin, n in sample]
        for text, n in [*segments, ([], capacity - sum(n for _, n in segments))]:  # then padding
            tokens += [*text, *[0] * n][:n]
            labels += [*text[1:], *[-100] * n][:n]  # a document's last token has no label
            positions += range(n)
            bounds += [len(tokens)] * (n > 0)
    rows = {"tokens": [tokens], "labels": [labels], "position_ids": [positions]}
    mask = {"loss_mask": [[float(label >= 0) for label in labels]]}
    longest = max(end - begin for begin, end in pairwise(bounds))
    return rows | mask | {"cu_seqlens": bounds, "max_seqlen": longest}


if __name__ == "__main__":
    documents = [[7] * (2 + number * number % 150) for number in range(99)]
    buckets = pack_bucket([len(document) for document in documents], [32, 64, 128])
    capacity, samples = step_samples(buckets, step_tokens=512, seed=0, step=0)
    for micro_batch in micro_batches(capacity, samples, rank=0, num_ranks=2, tokens=128):
        print(capacity, tensors(documents, capacity, micro_batch)["cu_seqlens"])
