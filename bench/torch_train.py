"""A whole training run of our PyTorch twin under a wall-clock budget: the peer of `cram_train` in equal_budget.sh.

usage: torch_train.py train --shards DIR --seconds S --seed N --save FILE [--layers N ...]
       torch_train.py judge --shards DIR --weights FILE|RUN_FOLDER [--layers N ...]

`train` reads the shards of `cram_data pack` in their order, masks with the recipe's 80/10/10 rule, and follows the
recipe's triangle2 schedule over the elapsed fraction of the budget. It first measures which of eager and compiled bf16 is
faster on this machine, trains in that mode from fresh weights, and starts the clock after compiling. Evaluations stop the
clock, as ours do. Prints one line `EVAL seconds=... step=... loss=...` an evaluation.

`judge` is the common referee: the held-out loss in fp32 of given weights (a saved file, or the newest checkpoint of a
cram run), on masks drawn once from a fixed seed, by the twin's own code. Prints one RESULT line.
"""

import argparse
import statistics
import time
from pathlib import Path

import h5py
import numpy as np
import torch

from torch_peer import Peer, synchronise, twin

JUDGE_SEED = 20230101


def read_rows(shards, split, at_most=None):
    """[N,S] int64 of all shards of a split, in order."""
    parts = []
    for path in sorted(Path(shards).glob(f"{split}-*.h5")):
        with h5py.File(path) as file:
            parts.append(file["input_ids"][:at_most])
    return torch.from_numpy(np.concatenate(parts)[:at_most].astype(np.int64))


def mask(rows, vocabulary, generator):
    """Masks a quarter of each row: 80 % [MASK], 10 % a random ordinary token, 10 % kept. Returns ids, positions, labels."""
    count, length = rows.shape
    n = length // 4
    chosen = torch.rand(count, length, generator=generator).argsort(1)[:, :n]  # in random order
    ids = rows.clone()
    to_mask, to_random = round(0.8 * n), round(0.9 * n)
    ids.scatter_(1, chosen[:, :to_mask], twin.MASK_ID)
    ids.scatter_(1, chosen[:, to_mask:to_random],
                 torch.randint(5, vocabulary, (count, to_random - to_mask), generator=generator))
    positions = chosen.sort(1).values + length * torch.arange(count)[:, None]
    positions = positions.reshape(-1)
    return ids, positions, rows.reshape(-1)[positions]


def triangle2(t):
    return max(0.0, min(0.25 + t, (1 - t) / 0.25))


def step(peer, batch, lr):
    peer.micro_step(tuple(x.to(peer.device, non_blocking=True) for x in batch))
    peer.update(lr)


@torch.no_grad()
def held_out_loss(model, rows, device):
    """Mean loss in fp32 on masks that are the same for everybody."""
    ids, positions, labels = mask(rows, model.config.vocab_size, torch.Generator().manual_seed(JUDGE_SEED))
    length, n, total = rows.shape[1], rows.shape[1] // 4, 0.0
    for first in range(0, len(rows), 64):
        last = min(first + 64, len(rows))
        here = positions[first * n:last * n] - first * length
        total += model.loss_sum(ids[first:last].to(device), here.to(device), labels[first * n:last * n].to(device)).item()
    return total / labels.numel()


def seconds_a_step(config, mode, rows, device, batch):
    """Median of some steps after compiling."""
    peer = Peer(config, mode, seed=0, device=device)
    generator = torch.Generator().manual_seed(0)
    batches = [mask(rows[:batch], config.vocab_size, generator) for _ in range(3)]
    times = []
    for number in range(12):
        start = time.perf_counter()
        step(peer, batches[number % 3], 1e-4)
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[4:])


def train(args, config, device):
    rows = read_rows(args.shards, "train")
    held_out = read_rows(args.shards, "validation", args.eval_rows)
    speeds = {mode: seconds_a_step(config, mode, rows, device, args.batch) for mode in args.modes.split(",")}
    mode = min(speeds, key=speeds.get)
    print("MODE", mode, " ".join(f"{m}={args.batch * config.seq_length / s:.0f}tokens/s" for m, s in speeds.items()), flush=True)
    peer = Peer(config, mode, seed=args.seed, device=device)
    generator = torch.Generator().manual_seed(1000 + args.seed)
    # Compiled code is cached by the measurement above; what is left of it happens here, with a rate of 0 and no state.
    step(peer, mask(rows[:args.batch], config.vocab_size, generator), 0.0)
    peer.rewind(args.seed)
    used, done, next_row, next_eval, before = 0.0, 0, 0, args.eval_every, time.perf_counter()
    while used < args.seconds:
        index = torch.arange(next_row, next_row + args.batch) % len(rows)
        next_row = (next_row + args.batch) % len(rows)
        step(peer, mask(rows[index], config.vocab_size, generator), args.lr * triangle2(used / args.seconds))
        synchronise(device)
        done += 1
        used += time.perf_counter() - before
        if used >= next_eval and used < args.seconds:
            print(f"EVAL seconds={used:.1f} step={done} loss={held_out_loss(peer.model, held_out, device):.6f}", flush=True)
            next_eval += args.eval_every
        before = time.perf_counter()
    loss = held_out_loss(peer.model, held_out, device)
    print(f"EVAL seconds={used:.1f} step={done} loss={loss:.6f}", flush=True)
    torch.save({n: p.detach().cpu() for n, p in peer.model.named_parameters()}, args.save)
    print(f"RESULT mode={mode} steps={done} tokens_per_s={done * args.batch * config.seq_length / used:.6g} loss={loss:.6f}")


def judge(args, config, device):
    weights = Path(args.weights)
    if weights.is_dir():
        newest = sorted(p for p in (weights / "checkpoints").iterdir() if p.name.startswith("step-"))[-1]
        with h5py.File(newest / "rank-00000.h5") as file:
            state = {name: torch.from_numpy(file["master"][name][()]) for name in file["master"]}
    else:
        state = torch.load(weights)
    model = twin.CrammedBert(config).to(device).eval()
    parameters = dict(model.named_parameters())
    missing = set(parameters) ^ set(state)
    if missing:
        raise SystemExit(f"torch_train: the weights of {weights} are of another model: {sorted(missing)[:3]}")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(state[name].reshape(p.shape))
    print(f"RESULT loss={held_out_loss(model, read_rows(args.shards, 'validation', args.eval_rows), device):.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["train", "judge"])
    parser.add_argument("--shards", required=True)
    for name, default in [("layers", 4), ("hidden", 256), ("heads", 4), ("ffn", 1024), ("batch", 32), ("seed", 0),
                          ("eval-rows", 2048)]:
        parser.add_argument("--" + name, type=int, default=default)
    for name, default in [("seconds", 600), ("eval-every", 60), ("lr", 2e-3)]:
        parser.add_argument("--" + name, type=float, default=default)
    parser.add_argument("--modes", default="eager-bf16,compiled-bf16")
    parser.add_argument("--save")
    parser.add_argument("--weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with h5py.File(sorted(Path(args.shards).glob("train-*.h5"))[0]) as file:
        vocabulary, length = int(file.attrs["vocab_size"]), int(file.attrs["seq_length"])
    config = twin.Config(layers=args.layers, hidden=args.hidden, heads=args.heads, ffn=args.ffn, vocab_size=vocabulary,
                         seq_length=length)
    {"train": train, "judge": judge}[args.command](args, config, torch.device(args.device))


if __name__ == "__main__":
    main()
