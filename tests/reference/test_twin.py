"""Checks the reference twin itself: against finite differences, torch.optim and loops written out from the recipe.

Plain Python; every check_* function runs, the exit code is the number of failures.
"""

import math
import sys
import traceback

import torch
import torch.nn.functional as F

import make_golden
from crammed_bert import AdamW, Config, CrammedBert, decays, sinusoidal_table, train_step

TINY = Config(layers=2, hidden=12, heads=3, ffn=20, vocab_size=23, seq_length=6)


def tiny(seed=0, config=TINY, scale=8.0):
    model = make_golden.make_model(config, seed, scale, 1.0)
    rng = make_golden.np.random.default_rng(seed)
    return model, make_golden.make_batch(config, 3, 2, rng)


def close(a, b, tolerance=1e-11):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    error = (a - b).abs().max().item()
    assert error <= tolerance * max(1.0, b.abs().max().item()), f"max difference {error}"


def check_public_size_and_names():
    with torch.device("meta"):
        model = CrammedBert(Config())
    assert model.parameter_count() == 119_589_889, model.parameter_count()
    expected = {
        "encoder.embedding.word_embedding.weight": (32768, 768),
        "encoder.embedding.pos_embedding.scale_factor": (1,),
        "encoder.embedding.norm.weight": (768,),
        "encoder.embedding.norm.bias": (768,),
        "encoder.final_norm.weight": (768,),
        "encoder.final_norm.bias": (768,),
        "decoder.weight": (32768, 768),
    }
    for n in range(16):
        prefix = f"encoder.layers.{n}."
        for norm in ("norm1", "norm2"):
            expected |= {f"{prefix}{norm}.weight": (768,), f"{prefix}{norm}.bias": (768,)}
        expected |= {
            prefix + "attn.self_attention.query_key_value.weight": (2304, 768),
            prefix + "attn.self_attention.norm_factor": (),
            prefix + "attn.dense.weight": (768, 768),
            prefix + "ffn.dense_in.weight": (3072, 768),
            prefix + "ffn.dense_out.weight": (768, 1536),
        }
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == expected


def check_initial_values():
    model = CrammedBert(Config(2, 64, 4, 96, 300, 16), torch.Generator().manual_seed(1))
    for name, p in model.named_parameters():
        if "norm" in name:
            assert bool((p == (0.0 if name.endswith("bias") else 1.0)).all()), name
        elif p.dim() == 2:
            assert abs(p.mean().item()) < 1.5e-3 and abs(p.std().item() - 0.02) < 2e-3, name
    assert model.encoder.embedding.pos_embedding.scale_factor.item() == 0.125
    assert model.encoder.embedding.word_embedding.weight[0].abs().max() > 0  # the pad row is like every row


def check_positions():
    table = sinusoidal_table(7, 10)
    for s in range(7):
        for i in range(5):
            angle = s * 10000 ** (-2 * i / 10)
            close(table[s, 2 * i], math.sin(angle), 1e-14)
            close(table[s, 2 * i + 1], math.cos(angle), 1e-14)


def check_forward_against_loops():
    """The whole forward again, one head and one position at a time, without sharing code with the twin."""
    model, (ids, positions, labels) = tiny()
    w = {n: t.detach() for n, t in model.state_dict().items()}
    heads, d = TINY.heads, TINY.hidden // TINY.heads

    def norm(x, prefix):
        x = x - x.mean()
        return x / torch.sqrt((x * x).mean() + 1e-12) * w[prefix + ".weight"] + w[prefix + ".bias"]

    def feed_forward(x, prefix):
        y = w[prefix + "dense_in.weight"] @ x
        value, gate = y[: len(y) // 2], y[len(y) // 2 :]
        return w[prefix + "dense_out.weight"] @ (value * gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))))

    logits, total = [], 0.0
    scale = w["encoder.embedding.pos_embedding.scale_factor"]
    for b, row in enumerate(ids.tolist()):
        xs = [w["encoder.embedding.word_embedding.weight"][t] for t in row]
        xs = [norm(x + scale * sinusoidal_table(6, 12)[s], "encoder.embedding.norm") for s, x in enumerate(xs)]
        for layer in range(TINY.layers):
            prefix = f"encoder.layers.{layer}."
            fused = [w[prefix + "attn.self_attention.query_key_value.weight"] @ norm(x, prefix + "norm1") for x in xs]
            mixed = []
            for s in range(len(xs)):
                out = []
                for a in range(heads):
                    q, k, v = ([f[a * 3 * d + part * d :][:d] for f in fused] for part in range(3))
                    p = torch.stack([q[s] @ other / math.sqrt(d) for other in k]).exp()
                    out.append(sum(p[j] * v[j] for j in range(len(xs))) / p.sum())
                mixed.append(w[prefix + "attn.dense.weight"] @ torch.cat(out))
            xs = [x + m for x, m in zip(xs, mixed)]
            xs = [x + feed_forward(norm(x, prefix + "norm2"), prefix + "ffn.") for x in xs]
        for position, label in zip(positions.tolist(), labels.tolist()):
            if position // len(row) == b:
                x = norm(xs[position % len(row)], "encoder.final_norm")
                logits.append(w["decoder.weight"] @ x)
                total += (logits[-1].exp().sum().log() - logits[-1][label]).item()
    close(model.logits(ids, positions).detach(), torch.stack(logits))
    close(model.loss_sum(ids, positions, labels).detach(), total)


def check_sparse_equals_dense():
    model, (ids, positions, labels) = tiny(1)
    dense = model.decoder(model.hidden(ids)).flatten(0, 1)
    close(model.logits(ids, positions), dense[positions], 1e-13)
    targets = torch.full((ids.numel(),), -100).scatter(0, positions, labels)
    close(model.loss_sum(ids, positions, labels), F.cross_entropy(dense, targets, ignore_index=-100, reduction="sum"))


def check_gradients_by_finite_differences():
    model, (ids, positions, labels) = tiny(2)
    model.loss_sum(ids, positions, labels).backward()
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        flat = p.detach().view(-1)
        for _ in range(3):
            index = int(torch.randint(flat.numel(), (1,), generator=generator))
            if name.endswith("word_embedding.weight"):
                index = max(index, TINY.hidden)  # the pad row's gradient is cut on purpose, see below
            kept, h = flat[index].item(), 1e-5
            values = []
            for offset in (h, -h):
                flat[index] = kept + offset
                values.append(model.loss_sum(ids, positions, labels).item())
            flat[index] = kept
            close(p.grad.view(-1)[index], (values[0] - values[1]) / (2 * h), 2e-6)


def check_pad_row_learns_from_the_decoder_only():
    model, (ids, positions, labels) = tiny(4)
    assert (ids == 0).any()
    x = model.hidden(ids).flatten(0, 1)[positions].detach()
    model.loss_sum(ids, positions, labels).backward()
    p = (x @ model.decoder.weight[0]).detach()
    probability = model.logits(ids, positions).softmax(-1)[:, 0].detach()
    assert p.shape == probability.shape
    expected = ((probability - (labels == 0).double())[:, None] * x).sum(0)
    close(model.decoder.weight.grad[0], expected)


def check_padding_mask():
    model, (ids, _, _) = tiny(5)
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[:, 4:] = False
    close(model.hidden(ids, keep)[:, :4], model.hidden(ids[:, :4]))


def check_adamw_equals_torch():
    ours, _ = tiny(6)
    theirs, _ = tiny(6)
    optimizer = AdamW(ours.named_parameters())
    named = list(theirs.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if decays(n)], "weight_decay": 0.01},
            {"params": [p for n, p in named if not decays(n)], "weight_decay": 0.0},
        ],
        lr=1.0, betas=(0.9, 0.98), eps=1e-12,
    )
    assert "encoder.embedding.pos_embedding.scale_factor" in [n for n, _ in named if decays(n)]
    rng = make_golden.np.random.default_rng(6)
    factors = []
    for step in range(12):
        ids, positions, labels = make_golden.make_batch(TINY, 3, 2, rng)
        lr = 1e-3 * (1 + step % 3)
        _, norm, factor = train_step(ours, optimizer, ids, positions, labels, lr)
        factors.append(factor)
        reference.zero_grad()
        (theirs.loss_sum(ids, positions, labels) / labels.numel()).backward()
        their_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        close(norm, their_norm.item(), 1e-12)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
            close(p.detach(), q.detach(), 1e-9)
    assert min(factors) < 1.0, factors


def check_sum_over_parts_equals_whole():
    model, (ids, positions, labels) = tiny(7)
    whole = model.loss_sum(ids, positions, labels).item()
    parts = 0.0
    for b in range(ids.shape[0]):
        inside = positions // ids.shape[1] == b
        parts += model.loss_sum(ids[b : b + 1], positions[inside] - b * ids.shape[1], labels[inside]).item()
    close(whole, parts, 1e-13)


def check_golden_files_are_readable():
    from safetensors.torch import load_file

    for name, spec in make_golden.VARIANTS.items():
        tensors = load_file(make_golden.GOLDEN / f"{name}.safetensors")
        model = CrammedBert(spec["config"]).double()
        model.load_state_dict({n: tensors["weight." + n].double() for n, _ in model.named_parameters()}, strict=False)
        close(model.logits(tensors["ids"], tensors["positions"]).detach(), tensors["logits"])
        close(model.loss_sum(tensors["ids"], tensors["positions"], tensors["labels"]).detach(), tensors["loss_sum"])
        assert (tensors["ids"] == 0).any() and (tensors["labels"] == 0).any()
        assert bool((tensors["positions"].diff() > 0).all())


def main():
    torch.set_num_threads(1)
    failures = 0
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        try:
            check()
            print(f"ok      {name}")
        except Exception:
            failures += 1
            print(f"FAILED  {name}")
            traceback.print_exc()
    return failures


if __name__ == "__main__":
    sys.exit(main())
