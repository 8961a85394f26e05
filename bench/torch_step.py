"""The training step of our PyTorch twin, as fast as PyTorch makes it: the peer of `cram_bench step`.

usage: torch_step.py --mode eager-fp32|eager-bf16|compiled-fp32|compiled-bf16 [--layers N ...] [--seconds 12]
                     [--device cpu|cuda] [--attention twin|sdpa]

The peer is torch_peer.py's. Compiling and the first steps are not measured. Attention is PyTorch's fused one (sdpa) on a GPU
unless told otherwise. Prints one RESULT line; exit code 33: out of memory.
"""

import argparse
import statistics
import sys
import time

import torch

import torch_peer
from torch_peer import twin


def make_batch(config, rows, masked, device, generator):
    ids = torch.randint(5, config.vocab_size, (rows, config.seq_length), generator=generator)
    chosen = torch.stack([torch.randperm(config.seq_length, generator=generator)[:masked].sort().values for _ in range(rows)])
    positions = (chosen + config.seq_length * torch.arange(rows)[:, None]).reshape(-1)
    flat = ids.view(-1)
    labels = flat[positions].clone()
    flat[positions] = twin.MASK_ID
    return ids.to(device), positions.to(device), labels.to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True, choices=torch_peer.MODES)
    for name, default in [("layers", 16), ("hidden", 768), ("heads", 12), ("ffn", 3072), ("vocab", 32768), ("seq", 128),
                          ("micro-batch", 32), ("accumulation", 1), ("threads", 0)]:
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", choices=["twin", "sdpa"])
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    config = twin.Config(layers=args.layers, hidden=args.hidden, heads=args.heads, ffn=args.ffn, vocab_size=args.vocab,
                         seq_length=args.seq)
    generator = torch.Generator().manual_seed(0)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch_step: --device cuda, but PyTorch sees no GPU: check the driver, or use --device cpu")
    peer = torch_peer.Peer(config, args.mode, 0, device, args.attention)
    batches = [make_batch(config, args.micro_batch, args.seq // 4, device, generator) for _ in range(4)]

    def seconds(call):
        start = time.perf_counter()
        call()
        torch_peer.synchronise(device)
        return time.perf_counter() - start

    def micro_step(number):
        nonlocal loss
        loss = peer.micro_step(batches[number % len(batches)], args.accumulation)

    def step(number):
        micro = [seconds(lambda: micro_step(number * args.accumulation + i)) for i in range(args.accumulation)]
        return micro, seconds(lambda: peer.update(1e-4))

    loss = None
    # The first compiles; on a GPU the second records the graph and the third replays it.
    compile_s = seconds(lambda: [step(warm_up) for warm_up in range(3 if device.type == "cuda" else 2)])
    steps, micros, updates, from_s, number = [], [], [], time.perf_counter(), 3
    while len(steps) < 3 or time.perf_counter() - from_s < args.seconds:
        micro, update_s = step(number)
        steps.append(sum(micro) + update_s)
        micros += micro
        updates.append(update_s)
        number += 1
    step_s = statistics.median(steps)
    print(f"RESULT tokens_per_s={args.micro_batch * args.accumulation * args.seq / step_s:.6g} step_ms={1e3 * step_s:.6g} "
          f"micro_ms={1e3 * statistics.median(micros):.6g} update_ms={1e3 * statistics.median(updates):.6g} "
          f"warm_up_s={compile_s:.3g} loss={loss.item() * args.accumulation:.6g}")


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError as error:
        print(f"torch_step: out of memory: {error}", file=sys.stderr)
        sys.exit(33)
