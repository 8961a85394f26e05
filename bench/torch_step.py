"""The training step of our PyTorch twin, as fast as PyTorch makes it: the peer of `cram_bench step`.

usage: torch_step.py --mode eager-fp32|eager-bf16|compiled-fp32|compiled-bf16 [--layers N ...] [--seconds 12]
                     [--device cpu|cuda] [--attention twin|sdpa]

Sparse prediction (decoder on the masked positions only), autocast for bf16 with fp32 weights, fused AdamW, gradient
clipping, as the public trainer does it. Compiling and the first steps are not measured. On a GPU, compiled modes use CUDA
graphs, and attention is PyTorch's fused one (sdpa) unless told otherwise. Prints one RESULT line; exit code 33: out of
memory.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "reference"))
import crammed_bert as twin  # noqa: E402


def make_batch(config, rows, masked, device, generator):
    ids = torch.randint(5, config.vocab_size, (rows, config.seq_length), generator=generator)
    chosen = torch.stack([torch.randperm(config.seq_length, generator=generator)[:masked].sort().values for _ in range(rows)])
    positions = (chosen + config.seq_length * torch.arange(rows)[:, None]).reshape(-1)
    flat = ids.view(-1)
    labels = flat[positions].clone()
    flat[positions] = twin.MASK_ID
    return ids.to(device), positions.to(device), labels.to(device)


class FusedAttention(twin.SelfAttention):
    """The twin's attention (same weight, same layout) through PyTorch's fused kernel."""

    def forward(self, x, keep):
        batch, length, hidden = x.shape
        qkv = self.query_key_value(x).view(batch, length, self.heads, 3, hidden // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [B,A,S,d]
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    for name, default in [("layers", 16), ("hidden", 768), ("heads", 12), ("ffn", 3072), ("vocab", 32768), ("seq", 128),
                          ("micro-batch", 32), ("accumulation", 1), ("threads", 0)]:
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", choices=["twin", "sdpa"])
    args = parser.parse_args()
    kind, precision = args.mode.split("-")
    if args.threads:
        torch.set_num_threads(args.threads)
    config = twin.Config(layers=args.layers, hidden=args.hidden, heads=args.heads, ffn=args.ffn, vocab_size=args.vocab,
                         seq_length=args.seq)
    generator = torch.Generator().manual_seed(0)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch_step: --device cuda, but PyTorch sees no GPU: check the driver, or use --device cpu")
    if (args.attention or ("sdpa" if device.type == "cuda" else "twin")) == "sdpa":
        twin.SelfAttention = FusedAttention
    model = twin.CrammedBert(config, generator).to(device).train()
    batches = [make_batch(config, args.micro_batch, args.seq // 4, device, generator) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-12, weight_decay=0.01, fused=True)

    # Gradients are added to tensors that are here already: else the first ones would be outputs of a CUDA graph, which the
    # next replay overwrites.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def loss_of(ids, positions, labels):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            hidden = model.encoder(ids).reshape(-1, config.hidden)[positions]
            logits = F.linear(hidden, model.encoder.embedding.word_embedding.weight)
        return F.cross_entropy(logits.float(), labels)

    if kind == "compiled":
        loss_of = torch.compile(loss_of, mode="reduce-overhead" if device.type == "cuda" else "default")

    def seconds(call):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def micro_step(number):
        nonlocal loss
        if kind == "compiled" and device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(*batches[number % len(batches)]) / args.accumulation
        loss.backward()

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # keeps the memory

    def step(number):
        micro = [seconds(lambda: micro_step(number * args.accumulation + i)) for i in range(args.accumulation)]
        return micro, seconds(update)

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
