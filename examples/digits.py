"""Handwritten digits: what data-parallel training takes, in three lines.

    python examples/digits.py                                             # one rank
    mpirun -np 2 python examples/digits.py                                # two ranks
    mpicomp-launch -np 2 python examples/digits.py --compression powersgd

Trains a small CNN on scikit-learn's 1797 handwritten digits, in about 20 seconds. The batch is
divided over the ranks, so every number of ranks trains the same model. The three lines that make
a script of one process into this one are marked with (1), (2) and (3).
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch
import torch.nn.functional as F
from _report import Report
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpicomp


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--compression", metavar="SPEC", help="None: MPICOMP_COMPRESSION, or none")
    parser.add_argument("--steps", type=int, default=660, help="optimizer steps; 22 are an epoch")
    parser.add_argument("--batch", type=int, default=64, help="samples a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument(
        "--momentum", type=float, default=0.9, help="0 with methods that apply their own, like dgc"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The digits, split once and for all into 1437 to train with and 360 held out."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:360], order[360:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),  # (n, 32, 8, 8)
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),  # (n, 64, 8, 8)
        nn.ReLU(),
        nn.MaxPool2d(2),  # (n, 64, 4, 4)
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Percent of ``data`` that the model gets right; each rank looks at its share."""
    x, y = data[mpicomp.rank() :: mpicomp.size()]
    correct: Tensor = (model(x).argmax(dim=1) == y).sum()
    return 100 * int(mpicomp.allreduce(correct, op=mpicomp.Sum)) / len(data)


def main() -> None:
    args = options()
    mpicomp.init()
    if args.batch % mpicomp.size():
        raise SystemExit(f"--batch must be a multiple of {mpicomp.size()} ranks, got {args.batch}")
    torch.manual_seed(args.seed)
    train, held_out = load_data()
    model = build_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum
    )

    # (1) each rank reads another part of the data
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        train, mpicomp.size(), mpicomp.rank(), seed=args.seed
    )
    # (2) and takes its share of the batch
    loader = DataLoader(train, args.batch // mpicomp.size(), sampler=sampler, drop_last=True)
    # (3) and gradients are averaged over the ranks
    optimizer = mpicomp.DistributedOptimizer(optimizer, compression=args.compression, model=model)

    with Report(steps=args.steps, samples_per_step=args.batch) as report:
        for epoch in range(math.ceil(args.steps / len(loader))):
            sampler.set_epoch(epoch)
            for x, y in itertools.islice(loader, args.steps - epoch * len(loader)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                report.step(loss)
            report.line(f"accuracy {accuracy(model, held_out):.2f} %")
    report.text(f"final held-out accuracy {accuracy(model, held_out):.2f} %")


if __name__ == "__main__":
    main()
