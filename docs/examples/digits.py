"""Learn to read handwritten digits on three machines.

    python docs/examples/digits.py                                    on your mesh
    gpulayer mesh local --nodes 3 -- python docs/examples/digits.py   or on this machine alone

The data are 1,797 real digits of 8 x 8 pixels that come with scikit-learn.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Module, Trainer


class DigitReader(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        hits = self(images).argmax(dim=1) == labels
        # sync_dist: each machine sees a third of the images; average over all of them.
        self.log("val_acc", hits.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def load_data():
    """Split the digits into 1,437 to learn from and 360 to check with, always the same ones."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # 0..16 -> 0..1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val = order[:-360], order[-360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def main():
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits.")
    parser.add_argument("--nodes", type=int, default=3, help="machines to train on")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    train, val = load_data()
    model = DigitReader()
    trainer = Trainer(num_nodes=args.nodes, max_epochs=args.epochs, log_every_n_steps=5)
    trainer.fit(
        model,
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=64),
    )

    # From here on only the machine you started this on runs, and `model` holds what was learned.
    images, labels = val.tensors
    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    print(f"trained for {trainer.global_step} steps on {args.nodes} machine(s)")
    print(f"validation accuracy: {accuracy:.1%}")


if __name__ == "__main__":
    main()
