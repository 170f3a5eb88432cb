"""nanotron's trainer on packed rows. The configuration has one data stage, with dataset: null.

    torchrun --nproc-per-node 8 examples/nanotron_packed.py --config-file config.yaml \
        --data-path corpus

``corpus`` is a .bin/.idx prefix or a manifest; docs/guides/nanotron.md.
"""

import argparse

from nanotron.trainer import DistributedTrainer

from megapack.integrations.hosts.nanotron import packed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file", required=True)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--num-workers", type=int, default=0)
    args = parser.parse_args()
    trainer = DistributedTrainer(args.config_file)
    trainer.train(packed(trainer, args.data_path, num_workers=args.num_workers))


if __name__ == "__main__":
    main()
