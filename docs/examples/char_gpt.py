"""A small character transformer learns to write Python from Python's own standard library.

    python docs/examples/char_gpt.py --nodes 3

Plain PyTorch with DistributedDataParallel: the line that makes it run on your mesh is launch().
The trained weights and a sample come back into gpulayer_jobs/ beside this file.
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path

from gpulayer.pytorch import launch

parser = argparse.ArgumentParser(description="Train a character transformer on Python source.")
parser.add_argument("--nodes", type=int, default=3, help="machines to train on")
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()

# On your machine: ships this folder, starts this script on the nodes, shows what they print and
# ends with their exit code. On the nodes: returns at once. All below runs on the nodes only.
launch(nodes=args.nodes)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

# Legend: B sequences in a batch, T characters in a sequence, C channels, V characters known.
T, C, HEADS, LAYERS, B = 64, 128, 4, 3, 16
# A fixed alphabet, so that all nodes agree on it whatever their copy of the library holds.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127)) + "?"  # the last: all others
V = len(ALPHABET)
MODULES = ("argparse", "ast", "dataclasses", "enum", "heapq", "pathlib", "random", "textwrap")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):  # (B, T, C)
        b, t, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, C // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, HEADS, T, C / HEADS)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, C))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters, self.places = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V)

    def forward(self, codes):  # (B, T) -> (B, T, V)
        places = torch.arange(codes.shape[1], device=codes.device)
        x = self.characters(codes) + self.places(places)
        return self.head(self.norm(self.blocks(x)))


def encode(text):
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([numbers.get(character, V - 1) for character in text])


def load_text():
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join((folder / f"{name}.py").read_text("utf-8") for name in MODULES)


def draw_batch(codes, generator):
    """Return B random pieces of the text, and the same one character further on."""
    starts = torch.randint(len(codes) - T - 1, (B,), generator=generator)
    pieces = torch.stack([codes[start : start + T + 1] for start in starts])  # (B, T + 1)
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def write_sample(model, beginning, length, device):
    codes = encode(beginning).to(device)
    for _ in range(length):
        scores = model(codes[None, -T:])[0, -1]
        following = torch.multinomial(F.softmax(scores / 0.7, dim=0), 1)
        codes = torch.cat([codes, following])
    return "".join(ALPHABET[code] for code in codes.tolist())


def main():
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)  # the same first weights everywhere
    model = DistributedDataParallel(CharGPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    codes = encode(load_text())
    generator = torch.Generator().manual_seed(rank)  # other pieces of text on each rank
    if rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{len(codes):,} characters, {size:,} parameters, {dist.get_world_size()} ranks")
        print(f"a loss of {math.log(V):.2f} is guessing")
    for step in range(1, args.steps + 1):
        inputs, targets = (part.to(device) for part in draw_batch(codes, generator))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: loss {total.item() / dist.get_world_size():.3f}")

    if rank == 0:
        sample = write_sample(model.module, "def ", 300, device)
        print(f"--- what it writes now ---\n{sample}")
        out = Path(os.environ["GPULAYER_OUT"])  # what is written here comes home
        torch.save(model.module.state_dict(), out / "char_gpt.pt")
        (out / "sample.txt").write_text(sample)
    # A rank that ends without this right after an exchange may abort instead.
    dist.destroy_process_group()


main()
