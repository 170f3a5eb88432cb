"""megatron.data.data_utils of GPT-NeoX: which datasets it builds, and how it reads them."""

import torch


class BlendableDataset(torch.utils.data.Dataset):
    def __init__(self, datasets, weights):
        raise AssertionError("NeoX's own blend was used")


def build_train_valid_test_datasets(**kwargs):
    raise AssertionError("NeoX's own datasets were built")


def build_weighted_datasets(*args, **kwargs):
    raise AssertionError("NeoX's own datasets were built")


class DistributedBatchSampler:
    """Consecutive runs of batch_size numbers; rank r has the r-th slice; start_iter are skipped."""

    def __init__(self, total, batch_size, rank, world_size):
        self.total, self.batch_size = total, batch_size
        self.rank, self.world_size, self.start_iter = rank, world_size, 0

    def __len__(self):
        return self.total // self.batch_size

    def __iter__(self):
        part = self.batch_size // self.world_size
        for batch in range(self.start_iter, len(self)):
            begin = batch * self.batch_size + self.rank * part
            yield list(range(begin, begin + part))


def make_data_loader(dataset, neox_args):
    if dataset is None:
        return None
    sampler = DistributedBatchSampler(
        len(dataset),
        neox_args.batch_size * neox_args.world_size,
        neox_args.rank,
        neox_args.world_size,
    )
    return torch.utils.data.DataLoader(dataset, batch_sampler=sampler)


def build_train_valid_test_data_loaders(neox_args):
    iters = neox_args.train_iters
    counts = [n * neox_args.train_batch_size for n in (iters, neox_args.eval_iters, 0)]
    if neox_args.train_data_paths:
        paths = (neox_args.train_data_paths, neox_args.valid_data_paths, [])
        # Each path gets its share and half a percent more.
        shares = [
            [int(count / max(1, len(p)) * 1.005) + 1 for _ in p]
            for count, p in zip(counts, paths, strict=True)
        ]
        built = build_weighted_datasets(neox_args, *shares, None, None, None)
        datasets = [BlendableDataset(found, [1.0]) if found else None for found in built]
    else:
        datasets = build_train_valid_test_datasets(
            data_prefix=neox_args.data_path,
            use_shared_fs=True,
            data_impl="mmap",
            pack_impl="packed",
            allow_chopped=True,
            splits_string=neox_args.split,
            train_valid_test_num_samples=counts,
            train_valid_test_epochs=[None, None, None],
            seq_length=neox_args.seq_length,
            seed=neox_args.seed,
            skip_warmup=True,
        )
    loaders = [make_data_loader(dataset, neox_args) for dataset in datasets]
    loaders[0].batch_sampler.start_iter = (
        neox_args.iteration * neox_args.gradient_accumulation_steps
    ) % len(loaders[0])
    return loaders
