"""The demo model as a PyTorch network: the `qwen3_5` text architecture, trainable on a CPU.

mlx-lm's linear attention is a Python loop over tokens, which no one can train with. This is the
same arithmetic in chunks, under the same parameter names, so that a checkpoint of ours is a
checkpoint of mlx-lm's; an export states its logits, and tests/server/test_demo_model.py compares.

    residual   (B, T, hidden)            linear layers: gated delta rule, state (B, H, Dk, Dv)
    attention  full, causal, gated       every `full_attention_interval`-th layer

Matrices multiply in bfloat16 where the CPU has AVX512-BF16 (it is six times faster than float32
there), the recurrence runs in float32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK: Final = 64  # tokens of the delta rule that are solved together


@dataclass(frozen=True, slots=True)
class Shape:
    """What config.json says of the network; the names are mlx-lm's."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    full_attention_interval: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 8
    rms_norm_eps: float = 1e-6
    rotary_dim: int = 16
    rope_theta: float = 4.0**8
    max_position_embeddings: int = 131_072

    def config(self) -> dict[str, Any]:
        """config.json as mlx-lm reads it."""
        fields = asdict(self)
        rotary = fields.pop("rotary_dim")
        theta = fields.pop("rope_theta")
        rope = {
            "type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotary / self.head_dim,
        }
        return {
            "model_type": "qwen3_5",
            **fields,
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        }


class Linear(nn.Module):
    """x @ W.T with the product in bfloat16, whatever the weights are kept in."""

    def __init__(self, n_in: int, n_out: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * (gain * n_in**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in the product's own type."""
        return F.linear(x.to(PRODUCT), self.weight.to(PRODUCT))


def product_type() -> torch.dtype:
    """bfloat16 where the CPU multiplies it itself; imitated, it is far slower than float32."""
    cpu = Path("/proc/cpuinfo")
    has_bf16 = cpu.exists() and "avx512_bf16" in cpu.read_text("utf-8")
    return torch.bfloat16 if has_bf16 else torch.float32


PRODUCT = product_type()  # exactness tests set float32


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight; float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normed over the last axis, float32."""
        x = x.float()
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        )


class Inverse(torch.autograd.Function):
    """The inverse of lower triangular matrices with ones on the diagonal.

    Its own backward pass, because that of a triangular solve is two more solves, each as slow as
    all other products of the delta rule together.
    """

    @staticmethod
    def forward(context: Any, system: Tensor) -> Tensor:
        """(..., n, n) -> (..., n, n)."""
        eye = torch.eye(system.shape[-1], dtype=system.dtype).expand_as(system)
        solved = torch.linalg.solve_triangular(
            system, eye, upper=False, unitriangular=True
        )
        context.save_for_backward(solved)
        return solved

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """d(A^-1) = -A^-1 dA A^-1; above the diagonal nothing is read."""
        (solved,) = context.saved_tensors
        turned = solved.transpose(-1, -2)
        return -(turned @ gradient @ turned).tril(-1)


inverse: Final = torch.compiler.disable(Inverse.apply)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over whole chunks, from an empty state.

    S[t] = e^decay[t] S[t-1];  S[t] += k[t] (beta[t] (v[t] - S[t] k[t]));  out[t] = S[t] q[t]

    q, k (N, T, Dk), v (N, T, Dv), decay (log, <= 0) and beta (N, T), N = batch x heads, T a
    multiple of CHUNK. Within a chunk the corrections solve one triangular system.
    """
    n, t, dk = k.shape
    c = CHUNK
    m = t // CHUNK
    q, k, v = (x.reshape(n, m, c, x.shape[-1]) for x in (q, k, v))
    beta = beta.reshape(n, m, c, 1)
    total = decay.reshape(n, m, c).cumsum(-1)

    lower = torch.ones(c, c, dtype=torch.bool, device=q.device).tril()
    log_gap = total[..., :, None] - total[..., None, :]
    gap = log_gap.masked_fill(~lower, -torch.inf).exp()
    system = (beta * k) @ k.transpose(-1, -2) * gap
    system = system.tril(-1) + torch.eye(c, device=q.device)
    grown = total.exp()[..., None]
    targets = torch.cat((beta * v, beta * k * grown), -1)
    fresh, erased = (inverse(system) @ targets).split((v.shape[-1], dk), -1)
    local = (q @ k.transpose(-1, -2)) * gap
    reads = q * grown
    left = (total[..., -1:] - total).exp()[..., None]
    writes = (k * left).transpose(-1, -2)
    remaining = total[..., -1].exp()[..., None, None]
    return scanned(Chunks(fresh, erased, reads, local, writes, remaining)).reshape(
        n, t, -1
    )


class Chunks(NamedTuple):
    """What each chunk of the delta rule does to the state; (N, n_chunks, ...)."""

    fresh: Tensor  # (.., CHUNK, Dv) what is written, if the state were empty
    erased: Tensor  # (.., CHUNK, Dk) what of the state those writes take back
    reads: Tensor  # (.., CHUNK, Dk) queries, decayed since the chunk began
    local: Tensor  # (.., CHUNK, CHUNK) what queries see of the chunk itself
    writes: Tensor  # (.., Dk, CHUNK) keys, decayed until the chunk ends
    kept: Tensor  # (.., 1, 1) what remains of the state


@torch.compiler.disable
def scanned(chunks: Chunks) -> Tensor:
    """The chunks one after the other; left out of compiled graphs, which would unroll it."""
    n, _, _, dk = chunks.erased.shape
    state = chunks.fresh.new_zeros(n, dk, chunks.fresh.shape[-1])
    outputs = []
    for fresh, erased, reads, local, writes, remaining in zip(
        *(part.unbind(1) for part in chunks), strict=True
    ):
        value = fresh - erased @ state
        outputs.append(torch.baddbmm(local @ value, reads, state))
        state = torch.baddbmm(state * remaining, writes, value)
    return torch.stack(outputs, 1)


class GatedDeltaNet(nn.Module):
    """Linear attention: a short convolution, the delta rule, a gated norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.linear_num_key_heads
        self.dk = shape.linear_key_head_dim
        self.dv = shape.linear_value_head_dim
        assert self.heads == shape.linear_num_value_heads, (
            "grouped heads are not built here"
        )
        self.key_size = self.heads * self.dk
        self.value_size = self.heads * self.dv
        width = 2 * self.key_size + self.value_size
        size = shape.hidden_size
        self.in_proj_qkv = Linear(size, width)
        self.in_proj_z = Linear(size, self.value_size)
        self.in_proj_b = Linear(size, self.heads)
        self.in_proj_a = Linear(size, self.heads)
        self.conv1d = (
            nn.Module()
        )  # a module only for its name; (channels, taps, 1) as in mlx-lm
        taps = shape.linear_conv_kernel_dim
        self.conv1d.weight = nn.Parameter(torch.randn(width, taps, 1) * taps**-0.5)
        # Memories of about 8 to 8000 tokens at the start.
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        step = torch.logspace(-1, -4, self.heads)
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = RMSNorm(self.dv, shape.rms_norm_eps)
        self.out_proj = Linear(self.value_size, size, gain=0.05)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden); T a multiple of CHUNK."""
        b, t, _ = x.shape
        qkv = self.convolved(self.in_proj_qkv(x))
        q, k, v = qkv.split((self.key_size, self.key_size, self.value_size), -1)
        q, k = (self.by_head(part, self.dk) for part in (q, k))
        q, k = (F.rms_norm(part.float(), (self.dk,), eps=1e-6) for part in (q, k))
        q = q / self.dk
        k = k * self.dk**-0.5
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = self.in_proj_b(x).float().sigmoid()
        decay, beta = (
            g.transpose(1, 2).reshape(b * self.heads, t) for g in (decay, beta)
        )
        output = delta_rule(q, k, self.by_head(v, self.dv).float(), decay, beta)
        output = output.reshape(b, self.heads, t, self.dv).transpose(1, 2)
        gate = F.silu(self.in_proj_z(x).float().reshape(b, t, self.heads, self.dv))
        return self.out_proj((self.norm(output) * gate).reshape(b, t, -1))

    def convolved(self, x: Tensor) -> Tensor:
        """Each channel over its last tokens, as shifted sums: conv1d is slow for few taps."""
        weight = self.conv1d.weight[..., 0]
        taps = weight.shape[1]
        x = F.pad(x, (0, 0, taps - 1, 0))
        length = x.shape[1] - taps + 1
        return F.silu(
            sum(x[:, i : i + length] * weight[:, i].to(x.dtype) for i in range(taps))
        )

    def by_head(self, x: Tensor, size: int) -> Tensor:
        """(B, T, heads * size) -> (B * heads, T, size)."""
        b, t, _ = x.shape
        return (
            x.reshape(b, t, self.heads, size)
            .transpose(1, 2)
            .reshape(b * self.heads, t, size)
        )


class Attention(nn.Module):
    """Full attention with normed queries and keys, a few rotary dimensions, a gate on the way out.

    Of each head 16 dimensions turn, with wavelengths from 6 to 103 thousand tokens, each four times
    the one before: enough to prefer what stood here lately to what stood there long ago.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.kv_heads = shape.num_key_value_heads
        self.size = shape.head_dim
        self.q_proj = Linear(shape.hidden_size, 2 * self.heads * self.size)
        self.k_proj = Linear(shape.hidden_size, self.kv_heads * self.size)
        self.v_proj = Linear(shape.hidden_size, self.kv_heads * self.size)
        self.o_proj = Linear(self.heads * self.size, shape.hidden_size, gain=0.05)
        self.q_norm = RMSNorm(self.size, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.size, shape.rms_norm_eps)
        for norm in (
            self.q_norm,
            self.k_norm,
        ):  # of 1.0, a thousand keys look alike for long
            nn.init.constant_(norm.weight, 1.5)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden); `turn` is cos and sin, (B or 1, 1, T, rotary / 2)."""
        b, t, _ = x.shape
        q, gate = self.q_proj(x).reshape(b, t, self.heads, 2 * self.size).chunk(2, -1)
        k = self.k_proj(x).reshape(b, t, self.kv_heads, self.size)
        v = self.v_proj(x).reshape(b, t, self.kv_heads, self.size).transpose(1, 2)
        q = rotated(self.q_norm(q).transpose(1, 2), turn).to(v.dtype)
        k = rotated(self.k_norm(k).transpose(1, 2), turn).to(v.dtype)
        if (group := self.heads // self.kv_heads) > 1:
            k = k.repeat_interleave(group, 1)
            v = v.repeat_interleave(group, 1)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = (
            output.transpose(1, 2).reshape(b, t, -1) * gate.reshape(b, t, -1).sigmoid()
        )
        return self.o_proj(output)


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """The first dimensions of each head turned by their position; half-split pairs."""
    cos, sin = turn
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, gain=0.05)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Mixing over tokens, then over channels; both are added to the residual."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.is_linear = (index + 1) % shape.full_attention_interval != 0
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = Attention(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden), float32."""
        normed = self.input_layernorm(x)
        x = x + (
            self.linear_attn(normed) if self.is_linear else self.self_attn(normed, turn)
        )
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """Tokens to what comes after them; embeddings are tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=shape.hidden_size**-0.5)
        self.layers = nn.ModuleList(
            Layer(shape, i) for i in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(B, T) ids and (B or 1, T) positions -> (B, T, hidden), normed; T: whole chunks."""
        pairs = torch.arange(self.shape.rotary_dim // 2, device=tokens.device)
        speed = self.shape.rope_theta ** (-2.0 * pairs / self.shape.rotary_dim)
        angle = positions[:, None, :, None].float() * speed
        turn = angle.cos(), angle.sin()
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden) -> (..., vocabulary), float32."""
        return F.linear(
            hidden.to(PRODUCT), self.embed_tokens.weight.to(PRODUCT)
        ).float()


# A beginning that can copy -----------------------------------------------------------------

CONSTANT: Final = (
    0.35  # dimension 0 of every embedding: a bias, where the layers have none
)
FEATURE_NORM: Final = (
    0.7  # of what the first layer tells of a token, beside an embedding's 1.0
)
# How much is told, and how much of that each head compares: of this token, of the one before it,
# and so on. Seven, because spaces are tokens: behind three of them all "in the" are alike.
TOLD: Final = (52, 44, 34, 26, 20, 16, 12)
COMPARED: Final = (20, 12, 7, 4, 2, 2, 1)
RECENCY: Final = (
    0.28  # of each slowly turning dimension, beside 4.6 for all that is compared
)


class Features(NamedTuple):
    """Directions of the residual that tell which token stands here, before it, and so on."""

    here: list[Tensor]  # (hidden, TOLD[i]) of the token i places back
    next: list[Tensor]  # the same as seen from the place behind it


@torch.no_grad()
def plant_copying(network: Network) -> None:
    """Set weights so that text which came before is continued as it went on then.

    A small network finds this by itself only after more tokens than two cores can read in a day,
    and nearly all that the demo does is copying. So training begins with it, and shapes it:

        layer 0   tells of each token which it is, and which the seven before it were: a constant
                  key that the delta rule overwrites at once, and a tap of the convolution for each
        layer 1   looks for a place where these came before: what stands there came next the last
                  time. It is added to the residual as it is.
    """
    shape = network.shape
    first = network.layers[0]
    second = network.layers[1]
    assert shape.full_attention_interval == 2
    assert shape.linear_conv_kernel_dim == len(TOLD) + 1
    assert shape.hidden_size == shape.num_attention_heads * shape.head_dim
    assert (
        shape.hidden_size == shape.linear_num_value_heads * shape.linear_value_head_dim
    )
    embeddings = network.embed_tokens.weight
    embeddings[:, 0] = CONSTANT
    basis = torch.linalg.qr(torch.randn(shape.hidden_size, shape.hidden_size))[0]
    basis[0] = 0.0
    plant_lookup(
        second.self_attn, plant_features(first.linear_attn, basis), shape.rotary_dim
    )


def plant_features(linear: GatedDeltaNet, basis: Tensor) -> Features:
    """The first channels tell of this token, the next ones of the token before, and so on."""
    keys = 2 * linear.key_size
    qkv = linear.in_proj_qkv.weight
    qkv.mul_(0.02)
    qkv[:keys, 0] = 1.0
    taps = linear.conv1d.weight[..., 0]
    taps.mul_(0.02)
    taps[:keys, -1] = 1.0
    reads = 1.5 * torch.randn(TOLD[0], qkv.shape[1]) * qkv.shape[1] ** -0.5
    reads[:, 0] = 0.0
    bases = []
    start = 0
    for distance, n in enumerate((TOLD[0], *TOLD)):
        channels = slice(keys + start, keys + start + n)
        qkv[channels] = reads[:n]
        taps[channels, -1 - distance] = 1.0
        bases.append(basis[:, start : start + n])
        start += n
    for projection, at_constant in ((linear.in_proj_z, 0.5), (linear.in_proj_b, 1.0)):
        projection.weight.mul_(0.02)
        projection.weight[:, 0] = at_constant
    linear.in_proj_a.weight[:, 0] = 2.0
    norm = 2.1 * linear.dv**0.5  # of what one head gives
    linear.out_proj.weight.copy_(basis * (FEATURE_NORM / norm))
    here = [base[:, :n] for base, n in zip(bases, TOLD, strict=False)]
    return Features(here, bases[1:])


def plant_lookup(attention: Attention, features: Features, n_turning: int) -> None:
    """Every head finds the place; each of them brings a part of what stands there.

    Of several places the latest is preferred: the slowly turning dimensions of queries and keys
    are constant, so their product is largest at a distance of nothing.
    """
    queries = attention.q_proj.weight.view(attention.heads, 2, attention.size, -1)
    keys = attention.k_proj.weight.view(attention.heads, attention.size, -1)
    queries.mul_(0.02)
    for head in range(attention.heads):
        parts = [chosen(size, n) for size, n in zip(TOLD, COMPARED, strict=True)]
        for weight, bases in (
            (queries[head, 0], features.here),
            (keys[head], features.next),
        ):
            compared = [part @ base.T for part, base in zip(parts, bases, strict=True)]
            weight[n_turning:] = torch.cat(compared)
            weight[:n_turning] = 0.0
            weight[3 : n_turning // 2, 0] = RECENCY
    attention.q_norm.weight.fill_(2.4)
    attention.k_norm.weight.fill_(2.4)
    identity = torch.eye(attention.heads * attention.size)
    identity[0] = 0.0
    attention.v_proj.weight.copy_(identity)
    attention.o_proj.weight.copy_(0.8 * identity)


def chosen(size: int, n: int) -> Tensor:
    """(n, size): orthonormal, and without the mean, because features are never negative."""
    mixed = torch.randn(size, size)
    return torch.linalg.qr((mixed - mixed.mean(1, keepdim=True)).T)[0].T[:n]
