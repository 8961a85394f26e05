"""Writes golden/: what the C++ model, optimizer and schedules must reproduce. --check compares instead of writing.

The files are a pure function of this script: inputs come from a fixed numpy seed, weights are rounded to float32 (and
stored so, hence exact in float64 too), everything computed is float64.
"""

import argparse
import math
import struct
import json
import sys
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import torch

from crammed_bert import MASK_ID, AdamW, Config, CrammedBert, train_step

GOLDEN = Path(__file__).resolve().parent / "golden"
FIRST_ORDINARY_ID = 5

# The head-size, layer-count and width mixtures are small but all different, so that no two axes can be swapped unseen.
VARIANTS = {
    "two_layers": dict(config=Config(2, 48, 4, 64, 101, 16), batch=5, masked=4, seed=11, scale=4.0, norm_scale=0.2, steps=50),
    "one_layer": dict(config=Config(1, 32, 2, 48, 37, 8), batch=1, masked=2, seed=12, scale=1.0, norm_scale=1.0, steps=0),
    # (norm_scale multiplies the final norm: at 0.2 the gradient norm lies about the clipping limit.)
    # Ten times larger weights: saturated attention, logits of several tens, both tiny and huge losses in one batch.
    "large_weights": dict(config=Config(3, 64, 2, 128, 259, 24), batch=3, masked=6, seed=13, scale=10.0, norm_scale=10.0, steps=0),
}
LRS = 5 * [1e-3, 2e-3, 5e-4, 1e-3, 3e-3, 1e-4, 7e-4, 1e-2, 1e-3, 2.5e-4]


def float32_exact(array):
    return np.asarray(array, dtype=np.float32).astype(np.float64)


def make_model(config, seed, scale, norm_scale):
    """Norm weights, norm biases and the position scale are off their initial values, or their gradients would be the
    only thing that shows a mistake."""
    rng = np.random.default_rng([seed, 0])
    model = CrammedBert(config).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = rng.standard_normal(tuple(p.shape))
            if name.endswith("scale_factor"):
                value = config.hidden**-0.5 * (1 + 0.1 * noise)
            elif "norm" in name:
                value = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
                if name.startswith("encoder.final_norm"):
                    value = value * norm_scale
            else:
                value = 0.02 * scale * noise
            p.copy_(torch.from_numpy(float32_exact(value)))
    return model


def make_batch(config, batch, masked, rng):
    """Pads stand in the input and pads are asked for, so that the pad row gets a gradient from the decoder only."""
    shape = (batch, config.seq_length)
    ids = rng.integers(FIRST_ORDINARY_ID, config.vocab_size, shape)
    slots = np.stack([rng.permutation(config.seq_length)[:masked] for _ in range(batch)])
    slots.sort(axis=1)
    positions = (slots + np.arange(batch)[:, None] * config.seq_length).reshape(-1)
    labels = ids.reshape(-1)[positions].copy()
    unmasked = np.setdiff1d(np.arange(ids.size), positions)
    ids.reshape(-1)[unmasked[rng.permutation(unmasked.size)[: max(1, unmasked.size // 12)]]] = 0
    ids.reshape(-1)[positions] = np.where(rng.random(positions.size) < 0.8, MASK_ID, ids.reshape(-1)[positions])
    labels[:: max(2, labels.size // 3)] = 0
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(labels)


def model_golden(config, batch, masked, seed, scale, norm_scale, steps):
    model = make_model(config, seed, scale, norm_scale)
    rng = np.random.default_rng([seed, 1])
    ids, positions, labels = make_batch(config, batch, masked, rng)
    with torch.no_grad():
        hidden = model.hidden(ids)
        logits = model.logits(ids, positions)
    if norm_scale > 1:  # half of the answers right, for losses near zero
        labels[1::2] = logits.argmax(-1)[1::2]
    out = {f"weight.{n}": p.detach().float() for n, p in model.named_parameters()}
    loss = model.loss_sum(ids, positions, labels)
    loss.backward()
    out |= {"ids": ids, "positions": positions, "labels": labels, "hidden": hidden, "logits": logits}
    out |= {"loss_sum": loss.detach(), "loss_mean": loss.detach() / labels.numel()}
    out |= {f"grad.{n}": p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    if steps:
        assert steps == len(LRS)
        optimizer = AdamW(model.named_parameters())
        factors = []
        for k, lr in enumerate(LRS, start=1):
            step_ids, step_positions, step_labels = make_batch(config, batch, masked, rng)
            if k % 4 == 0:  # one answer for every question: a large gradient, hence a strong clip
                step_labels.fill_(step_labels[1])
            mean, norm, factor = train_step(model, optimizer, step_ids, step_positions, step_labels, lr)
            out |= {f"step.{k}.ids": step_ids, f"step.{k}.positions": step_positions, f"step.{k}.labels": step_labels}
            for what, value in (("loss_mean", mean), ("grad_norm", norm), ("clip_factor", factor)):
                out[f"step.{k}.{what}"] = torch.tensor(value, dtype=torch.float64)
            factors.append(factor)
        if not (1.0 in factors[:3] and min(factors) < 0.5):
            raise SystemExit(f"the clip must engage in some steps and not in an early one: {factors}")
        out["lrs"] = torch.tensor(LRS, dtype=torch.float64)
        for n, p in model.named_parameters():
            out[f"after{steps}.{n}"] = p.detach()
            out[f"after{steps}.exp_avg.{n}"] = optimizer.exp_avg[n]
            out[f"after{steps}.exp_avg_sq.{n}"] = optimizer.exp_avg_sq[n]
    return out


DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64"}


def safetensors_bytes(tensors, metadata):
    """Tensors in name order; the official writer orders its metadata by hash, so two runs of it need not be equal."""
    header, blobs, offset = {"__metadata__": metadata}, [], 0
    for name in sorted(tensors):
        t = tensors[name].detach().contiguous()
        blob = t.numpy().tobytes()
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def model_file(name):
    spec = VARIANTS[name]
    c = spec["config"]
    metadata = {"format": "pt", "description": "reference twin of the encoder in float64; grad.* of the loss sum"}
    for key in ("layers", "hidden", "heads", "ffn", "vocab_size", "seq_length"):
        metadata[key] = str(getattr(c, key))
    if spec["steps"]:
        metadata["optimizer"] = "AdamW beta1 0.9 beta2 0.98 eps 1e-12 weight_decay 0.01 clip 0.5"
    return safetensors_bytes(model_golden(**spec), metadata)


# Schedules. f(t) for t in [0,1], later times count as 1; w is the warm-up, c the cool-down of the ramp.
#   every shape        t/w while t < w; below, t >= w; never negative
#   one-cycle          1 - |2t - 1|
#   triangle1          min(0.5 + t * 0.5/0.75, (1 - t)/0.25)
#   triangle2          min(0.25 + t * 0.75/0.75, (1 - t)/0.25)
#   constant           1
#   linear             (1 - t)/(1 - w)
#   cosine             (1 + cos(pi (t - w)/(1 - w)))/2
#   inverse-sqrt       sqrt(w/t)
#   dive-fast,-,-slow  min(1, (1 - t)/f), f = 0.25, 0.5, 0.75
#   ramp               t while t <= 1 - c, then (1 - c)(1 - t)/c
# The triangles are one family in the public code of the paper (cramming/backend/optimizers/schedulers.py): start b, fall
# f = 0.25 of the budget, min(b + t (1 - b)/(1 - f), (1 - t)/f), b = 0.5 and 0.25. Its ramp climbs to 1 - c at t = 1 - c.
def schedule(shape, w, c, t):
    t, w, c = (mpmath.mpf(x) for x in (min(t, 1.0), w, c))
    if t < w:
        return t / w
    triangle = lambda base: min(base + t * (1 - base) / mpmath.mpf("0.75"), (1 - t) / mpmath.mpf("0.25"))
    dive = lambda fall: min(mpmath.mpf(1), (1 - t) / mpmath.mpf(fall))
    value = {
        "one-cycle": lambda: 1 - abs(2 * t - 1),
        "triangle1": lambda: triangle(mpmath.mpf("0.5")),
        "triangle2": lambda: triangle(mpmath.mpf("0.25")),
        "constant": lambda: mpmath.mpf(1),
        "linear": lambda: (1 - t) / (1 - w),
        "cosine": lambda: (1 + mpmath.cos(mpmath.pi * (t - w) / (1 - w))) / 2,
        "inverse-sqrt": lambda: mpmath.sqrt(w / t),
        "dive-fast": lambda: dive("0.25"),
        "dive": lambda: dive("0.5"),
        "dive-slow": lambda: dive("0.75"),
        "ramp": lambda: t if t <= 1 - c else (1 - c) * (1 - t) / c,
    }[shape]()
    return max(mpmath.mpf(0), value)


SHAPES = ("one-cycle", "triangle1", "triangle2", "constant", "linear", "cosine", "inverse-sqrt", "dive-fast", "dive",
          "dive-slow", "ramp")


def schedules_text():
    lines = ["# shape w c t factor: the learning-rate factor at progress t, 17 digits, from exact arithmetic"]
    with mpmath.workdps(50):
        for shape in SHAPES:
            for w in (0.0, 0.0625, 0.1, 0.5):
                if shape == "inverse-sqrt" and w == 0:  # undefined without a warm-up
                    continue
                for c in (0.1, 0.25) if shape == "ramp" else (0.0,):
                    times = {0.0, 1e-6, 0.01, 0.2, 0.25, 1 / 3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.999, 1.0, 1.1, 2.0}
                    if w:
                        times |= {w / 2, math.nextafter(w, 0), w, math.nextafter(w, 1), 2 * w}
                    for t in sorted(times):
                        value = float(schedule(shape, w, c, t))
                        lines.append(f"{shape} {w:.17g} {c:.17g} {t:.17g} {value:.17g}")
    return ("\n".join(lines) + "\n").encode()


def batch_ramp_text():
    """min(batch, floor(t/ramp * batch/q + 1) * q), ramp 0 = off. Times at which a rounding error could move the floor
    are left out, unless every step of the formula is exact in binary."""
    lines = ["# ramp batch q t target: sequences in the batch at progress t"]
    for ramp, batch, q in ((0.6, 8192, 128), (0.5, 8192, 128), (0.25, 64, 16), (0.6, 96, 32), (1.0, 1024, 1024),
                           (0.6, 4096, 256), (0.0, 8192, 128), (0.0, 48, 48)):
        edges = [k / 8 for k in range(9)] if ramp else []
        for t in sorted({0.0, 1e-9, 0.003, 0.01, 0.0999, 0.15, 0.2, 0.3, 0.4501, 0.59, 0.5999, 0.6, 0.601, 0.75, 0.99, 1.0,
                         1.5, *(ramp * e for e in edges), math.nextafter(ramp, 2)}):
            if ramp == 0 or t >= ramp:
                target = batch
            else:
                exact = Fraction(t) / Fraction(ramp) * batch / q
                if abs(exact - round(exact)) < Fraction(1, 10**6) and exact != 0 and ramp not in (0.25, 0.5, 1.0):
                    if exact > Fraction(1, 10**3):
                        continue
                target = min(batch, (math.floor(exact + 1)) * q)
            lines.append(f"{ramp:.17g} {batch} {q} {t:.17g} {target}")
    return ("\n".join(lines) + "\n").encode()


def build():
    files = {f"{name}.safetensors": model_file(name) for name in VARIANTS}
    files["schedules.txt"] = schedules_text()
    files["batch_ramp.txt"] = batch_ramp_text()
    return files


def differences(name, fresh, stored):
    """Another processor may round a sum otherwise, so only float64 values may differ, and only in the last digits."""
    if fresh == stored:
        return []
    if not name.endswith(".safetensors"):
        return [f"{name}: text differs"]
    from safetensors.torch import load

    a, b = load(fresh), load(stored)
    if sorted(a) != sorted(b):
        return [f"{name}: other tensor names"]
    bad = []
    for key in a:
        x, y = a[key], b[key]
        same = x.dtype == y.dtype and x.shape == y.shape
        if same and x.dtype == torch.float64:
            same = bool(((x - y).abs() <= 1e-9 * (y.abs() + y.abs().max())).all())
        elif same:
            same = torch.equal(x, y)
        if not same:
            bad.append(f"{name}: {key} differs")
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the files in golden/, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = build()
    if not arguments.check:
        GOLDEN.mkdir(exist_ok=True)
        for name, data in files.items():
            (GOLDEN / name).write_bytes(data)
            print(f"{name}: {len(data):,} bytes")
        return 0
    if build() != files:
        print("golden files: two runs of this script differ")
        return 1
    bad = []
    for name, data in files.items():
        path = GOLDEN / name
        bad += differences(name, data, path.read_bytes()) if path.exists() else [f"{name}: missing"]
    print("\n".join(bad) if bad else f"golden files: {len(files)} agree")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
