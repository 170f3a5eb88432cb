"""concat and bucket_naive: documents joined to streams; pad: documents alone. Atom sizes."""

from __future__ import annotations

from itertools import chain

from reference.common import Packing, Sample, cut, joined, tokens, whole, without_partial
from reference.random import ATOMS, DOCUMENTS, random_for, shuffled


def taken_in_order(lengths: list[int], shuffle: bool, seed: int) -> list:
    if not shuffle:
        return whole(lengths)
    return whole(lengths, shuffled(len(lengths), random_for(seed, DOCUMENTS)))


def concat(
    lengths: list[int],
    buckets: list[int],
    seed: int,
    *,
    shuffle: bool = True,
    atom_size: int | None = None,
    last: str = "pad",
) -> Packing:
    [capacity] = buckets
    atom_size = atom_size or capacity
    stream = taken_in_order(lengths, shuffle, seed)
    if atom_size != capacity:
        atoms = joined(stream, atom_size)
        full = [atom for atom in atoms if tokens(atom) == atom_size]
        order = shuffled(len(full), random_for(seed, ATOMS))
        stream = list(chain(*(full[i] for i in order), *atoms[len(full) :]))
    samples = joined(stream, capacity)
    dropped = 0
    if last == "drop":
        samples, dropped = without_partial(samples, capacity)
    return Packing({capacity: samples}, dropped)


def bucket_naive(
    lengths: list[int], buckets: list[int], seed: int, *, shuffle: bool = True
) -> Packing:
    streams: dict[int, list] = {capacity: [] for capacity in buckets}
    for document in taken_in_order(lengths, shuffle, seed):
        holding = [capacity for capacity in buckets if document.length <= capacity]
        streams[min(holding, default=buckets[-1])].append(document)
    return Packing({capacity: joined(stream, capacity) for capacity, stream in streams.items()})


def pad(
    lengths: list[int], buckets: list[int], seed: int, *, atom_size: int | None = None
) -> Packing:
    [capacity] = buckets
    atom_size = atom_size or capacity
    atoms: list[Sample] = []
    for document in whole(lengths):
        atoms += joined([document], atom_size)
    if atom_size != capacity:
        order = shuffled(len(atoms), random_for(seed, ATOMS))
        atoms = [atoms[i] for i in order]
    if atom_size >= capacity:  # split: no sample consists of padding only
        samples = [sample for atom in atoms for sample in joined(atom, capacity)]
    else:  # merge: each atom takes atom_size tokens of the sample, padded or not
        merged = capacity // atom_size
        groups = [atoms[i : i + merged] for i in range(0, len(atoms), merged)]
        samples = [list(chain(*group)) for group in groups]
    return Packing({capacity: samples})


def next_fit(lengths: list[int], buckets: list[int], seed: int, *, shuffle: bool = True) -> Packing:
    [capacity] = buckets
    chunks, rests = cut(taken_in_order(lengths, shuffle, seed), capacity)
    return Packing({capacity: [[chunk] for chunk in chunks] + next_fit_samples(rests, capacity)})


def length_sorted(lengths: list[int], buckets: list[int], seed: int) -> Packing:
    [capacity] = buckets
    chunks, rests = cut(whole(lengths), capacity)
    rests.sort(key=lambda rest: rest.length)
    return Packing({capacity: [[chunk] for chunk in chunks] + next_fit_samples(rests, capacity)})


def next_fit_samples(rests: list, capacity: int) -> list[Sample]:
    samples: list[Sample] = []
    for remainder in rests:
        if not samples or tokens(samples[-1]) + remainder.length > capacity:
            samples.append([])
        samples[-1].append(remainder)
    return samples
