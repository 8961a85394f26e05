"""The encoder, its loss and its optimizer once more in plain PyTorch: the second opinion the C++ is compared with.

Written from the recipe, for reading rather than for speed. Shapes: B batch, S sequence, H hidden, A heads, d head size,
F rows of dense_in, V vocabulary, M masked positions of the whole batch.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Config:
    layers: int = 16
    hidden: int = 768
    heads: int = 12
    ffn: int = 3072  # rows of dense_in: value half and gate half together
    vocab_size: int = 32768
    seq_length: int = 128
    dropout: float = 0.0

    def __post_init__(self):
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.hidden % 2 or self.ffn % 2:
            raise ValueError(f"hidden {self.hidden} and ffn {self.ffn} must be even")


PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(5)
NORM_EPS = 1e-12
INIT_STD = 0.02


def sinusoidal_table(seq_length, hidden):
    """[S,H] fp64; even columns are sines, odd columns the cosines of the same angle."""
    position = torch.arange(seq_length, dtype=torch.float64)[:, None]
    pair = torch.arange(0, hidden, 2, dtype=torch.float64)[None, :]
    angle = position * torch.pow(torch.tensor(10000.0, dtype=torch.float64), -pair / hidden)  # [S,H/2]
    return torch.stack((angle.sin(), angle.cos()), dim=-1).reshape(seq_length, hidden)


class ScaledPositions(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.tensor([config.hidden**-0.5]))
        self.register_buffer("table", sinusoidal_table(config.seq_length, config.hidden), persistent=False)

    def forward(self, length):
        return self.scale_factor * self.table[:length].to(self.scale_factor.dtype)  # [S,H]


class Embedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        # padding_idx only cuts the gradient of the look-up; the row itself is initialised like every other.
        self.word_embedding = nn.Embedding(config.vocab_size, config.hidden, padding_idx=PAD_ID)
        self.pos_embedding = ScaledPositions(config)
        self.norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.dropout = config.dropout

    def forward(self, ids):
        x = self.word_embedding(ids) + self.pos_embedding(ids.shape[1])  # [B,S,H]
        return F.dropout(self.norm(x), self.dropout, self.training)


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.register_buffer("norm_factor", torch.tensor((config.hidden // config.heads) ** -0.5, dtype=torch.float64))

    def forward(self, x, keep):
        batch, length, hidden = x.shape
        # The rows of the fused weight are grouped per head: [A,3,d].
        qkv = self.query_key_value(x).view(batch, length, self.heads, 3, hidden // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [B,A,S,d]
        scores = q @ k.transpose(-1, -2) * self.norm_factor.to(x.dtype)  # [B,A,S,S]
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, :], float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, hidden)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.dense = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x, keep):
        return self.dense(self.self_attention(x, keep))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense_in = nn.Linear(config.hidden, config.ffn, bias=False)
        self.dense_out = nn.Linear(config.ffn // 2, config.hidden, bias=False)

    def forward(self, x):
        value, gate = self.dense_in(x).chunk(2, dim=-1)
        return self.dense_out(F.gelu(gate) * value)  # the exact GELU (erf)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.ffn = FeedForward(config)
        self.dropout = config.dropout

    def forward(self, x, keep):
        x = x + F.dropout(self.attn(self.norm1(x), keep), self.dropout, self.training)
        return x + F.dropout(self.ffn(self.norm2(x)), self.dropout, self.training)


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)

    def forward(self, ids, keep=None):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, keep)
        return self.final_norm(x)  # [B,S,H]


class CrammedBert(nn.Module):
    """Parameter names are those of the public checkpoint; decoder.weight is the word embedding itself."""

    def __init__(self, config, generator=None):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.decoder.weight = self.encoder.embedding.word_embedding.weight
        self.initialise_(generator)

    @torch.no_grad()
    def initialise_(self, generator=None):
        for name, p in self.named_parameters():
            if "norm" in name:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            elif p.dim() == 2:
                p.normal_(0.0, INIT_STD, generator=generator)

    def hidden(self, ids, keep=None):
        return self.encoder(ids, keep)

    def logits(self, ids, positions, keep=None):
        """Sparse prediction: positions [M] are flat b*S+s, and only those rows meet the decoder."""
        x = self.hidden(ids, keep).flatten(0, 1)[positions]  # [M,H]
        return self.decoder(x)  # [M,V]

    def loss_sum(self, ids, positions, labels):
        """Sum, not mean: the count is global over micro-batches and ranks, so whoever steps divides once."""
        return F.cross_entropy(self.logits(ids, positions), labels, reduction="sum")

    def parameter_count(self):
        return sum(p.numel() for p in self.parameters())


def decays(name):
    return "norm" not in name and "bias" not in name


def clip_factor(norm, limit):
    return min(1.0, limit / (norm + 1e-6))


class AdamW:
    """Decoupled weight decay, written out. step() takes the gradients of the loss sum and the count they sum over."""

    def __init__(self, named_parameters, beta1=0.9, beta2=0.98, eps=1e-12, weight_decay=0.01, clip=0.5):
        self.parameters = dict(named_parameters)
        self.beta1, self.beta2, self.eps, self.weight_decay, self.clip = beta1, beta2, eps, weight_decay, clip
        self.steps = 0
        self.exp_avg = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        self.exp_avg_sq = {n: torch.zeros_like(p) for n, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, lr, count):
        """Returns the norm of the mean gradient before clipping, and the clip factor."""
        gradients = {n: p.grad / count for n, p in self.parameters.items()}
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        factor = clip_factor(norm, self.clip) if self.clip > 0 else 1.0
        self.steps += 1
        correction1 = 1 - self.beta1**self.steps
        correction2 = 1 - self.beta2**self.steps
        for name, p in self.parameters.items():
            g = gradients[name] * factor
            if decays(name):
                p.sub_(p, alpha=lr * self.weight_decay)
            m, v = self.exp_avg[name], self.exp_avg_sq[name]
            m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            p.sub_(lr * (m / correction1) / ((v / correction2).sqrt() + self.eps))
            p.grad = None
        return norm, factor


def train_step(model, optimizer, ids, positions, labels, lr):
    """One update on one batch: (mean loss, gradient norm, clip factor)."""
    loss = model.loss_sum(ids, positions, labels)
    loss.backward()
    count = positions.numel()
    norm, factor = optimizer.step(lr, count)
    return loss.item() / count, norm, factor
