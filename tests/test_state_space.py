"""The maps of state-space layers against their explicit matrices, at lengths around every chunk."""

from dataclasses import replace

import pytest
import torch

from tensorlens_tl.algebra import CausalConvolution, SelectiveScan, memory, recursion
from tensorlens_tl.errors import SizeError
from tensorlens_tl.testing import Allocations, check_map

pytestmark = pytest.mark.numeric
HEADS, GROUPS, STATES = 6, 3, 5


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def scan(kind, pos, *, batch=2, heads=HEADS, groups=GROUPS, states=STATES, head_dim=2):
    """A scan with rates for each head and state (1) or for each head (2), some decays next to nothing."""
    rates = -3 * torch.rand(*((heads, states) if kind == 1 else (heads,)), dtype=torch.float64).square()
    delta = 4 * torch.rand(batch, pos, heads, dtype=torch.float64).square()
    return SelectiveScan(delta, rates, normal(batch, pos, groups, states), normal(batch, pos, groups, states), head_dim)


def alpha(m):
    """The definition: a product of decays for each pair of positions, `[batch, head, query, key]`."""
    pos, heads = m.delta.shape[1:]
    decay = torch.exp(m.delta[..., None] * (m.A if m.A.ndim == 2 else m.A[:, None]))
    B, C = (held.repeat_interleave(heads // held.shape[2], 2) for held in (m.B, m.C))
    made = torch.zeros(len(decay), heads, pos, pos, dtype=decay.dtype)
    for i in range(pos):
        for j in range(i + 1):
            made[:, :, i, j] = (C[:, i] * decay[:, j + 1 : i + 1].prod(1) * B[:, j]).sum(-1) * m.delta[:, j]
    return made


@pytest.fixture(params=[None, 1, 3, 16])
def chunk(request, monkeypatch):
    """Chunks of so many positions, or as many as are chosen."""
    if request.param:
        monkeypatch.setattr(recursion, "_chunk_size", lambda *held: request.param)


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("pos", [1, 2, 3, 4, 17, 33])
def test_against_the_explicit_matrix(kind, pos, chunk):
    m = scan(kind, pos)
    matrix, x = alpha(m), normal(3, 2, pos, 2 * HEADS)
    heads = x.unflatten(-1, (HEADS, 2))
    for made, equation in ((m.push(x), "bhij,rbjhd->rbihd"), (m.pull(x), "bhji,rbjhd->rbihd")):
        expected = torch.einsum(equation, matrix, heads).flatten(-2)
        assert float((made - expected).norm() / expected.norm()) <= 1e-12
    assert float((m.implicit_attention() - matrix).abs().max()) <= 1e-12 * float(matrix.abs().max())
    assert torch.allclose(m.mean_attention(), matrix.abs().mean(1), rtol=1e-9, atol=1e-14)
    largest = float(torch.linalg.matrix_norm(matrix, 2).max())
    assert largest <= m.norm_bound() < 20 * largest


@pytest.mark.parametrize("kind", [1, 2])
def test_a_long_prompt_and_rows_that_take_turns(kind, monkeypatch):
    m = scan(kind, 70)
    matrix, x = alpha(m), normal(4, 3, 2, 70, 2 * HEADS)
    together = m.push(x)
    monkeypatch.setattr(recursion, "CHUNK_BYTES", 5 * 2 * HEADS * 2 * STATES * 8)  # five rows at a time
    taken = m.push(x)
    expected = torch.einsum("bhij,...bjhd->...bihd", matrix, x.unflatten(-1, (HEADS, 2))).flatten(-2)
    for made in (together, taken):
        assert float((made - expected).norm() / expected.norm()) <= 1e-12
    assert torch.allclose(m.at(slice(20, 50)).implicit_attention(), matrix[:, :, 20:50, 20:50], atol=1e-12)


@pytest.mark.parametrize("kind", [1, 2])
def test_the_adjoint_is_autograds_and_gradients_reach_what_is_held(kind, chunk):
    m, x, g = scan(kind, 9), normal(2, 9, 2 * HEADS), normal(2, 9, 2 * HEADS)
    assert torch.allclose(torch.func.vjp(m.push, x)[1](g)[0], m.pull(g), atol=1e-12)
    small = scan(kind, 4, batch=1, heads=2, groups=1, states=2, head_dim=1)
    held = [part.clone().requires_grad_() for part in (small.delta, small.A, small.B, small.C)]
    assert torch.autograd.gradcheck(lambda *held: SelectiveScan(*held).push(x[:1, :4, :2]), held)


def test_decays_that_leave_nothing_or_everything():
    """A product of decays that underflows, and no decay at all, where every output reads all inputs alike."""
    m = scan(2, 40)
    gone = replace(m, A=torch.full_like(m.A, -1e4))
    assert torch.isfinite(gone.push(normal(2, 40, 2 * HEADS))).all()
    kept = replace(m, A=torch.zeros_like(m.A))
    kernel = torch.einsum("bign,bjgn->bgij", m.C, m.B).tril().repeat_interleave(2, 1)
    expected = kernel * m.delta.mT[:, :, None]
    assert torch.allclose(kept.implicit_attention(), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_in_float32_beside_vectors_of_any_dtype(dtype):
    m, x = scan(1, 33), normal(2, 33, 2 * HEADS)
    narrow = SelectiveScan(m.delta.float(), m.A.float(), m.B.float(), m.C.float(), 2)
    for made, expected in ((narrow.push(x.to(dtype)), m.push(x)), (narrow.pull(x.to(dtype)), m.pull(x))):
        assert made.dtype == dtype
        assert float((made - expected).norm() / expected.norm()) <= 4 * torch.finfo(dtype).eps


def test_memory_does_not_grow_with_states_times_positions():
    m = scan(2, 512, batch=1, heads=4, groups=1, states=64, head_dim=16)
    x = normal(8, 1, 512, 64)
    with Allocations() as used:
        m.push(x)
    assert used.peak < 10 * x.numel() * x.element_size() < x.numel() * 64 * x.element_size() / 4


def test_memory_of_states_is_bounded(monkeypatch):
    m = scan(1, 8, batch=1, heads=64, groups=1, states=256, head_dim=1)
    x = normal(256, 1, 8, 64)
    monkeypatch.setattr(recursion, "CHUNK_BYTES", 2**20)
    with Allocations() as used:
        m.push(x)
    assert used.peak < len(x) * 64 * 256 * 8 / 2  # half of all rows' states


def test_matrices_that_are_too_large_are_refused(monkeypatch):
    m = scan(1, 8)
    monkeypatch.setattr(memory, "MOST_BYTES", 8 * 2 * 8 * 8)
    assert m.mean_attention().shape == (2, 8, 8)
    assert torch.equal(m.mean_attention(memory=4 * m.delta.numel() * 8), m.mean_attention())
    with pytest.raises(SizeError, match="implicit_attention"):
        m.implicit_attention()
    with pytest.raises(SizeError, match="one row"):
        m.mean_attention(memory=10)


# ------------------------------------------------------------------ convolutions


@pytest.mark.parametrize(("pos", "width"), [(1, 4), (2, 4), (9, 4), (9, 1)])
def test_a_convolution_is_torchs(pos, width):
    conv = torch.nn.Conv1d(6, 6, width, groups=6, padding=width - 1, dtype=torch.float64)
    x = normal(3, pos, 6)
    m = CausalConvolution(conv.weight.detach()[:, 0], conv.bias.detach())
    assert torch.allclose(m(x), conv(x.mT)[..., :pos].mT, atol=1e-14)
    check_map(m, x)
    assert m.norm_bound() == pytest.approx(float(conv.weight.detach().abs().sum(-1).max()))


def test_a_bound_of_a_convolution_is_reached_by_the_longest_waves():
    m = CausalConvolution(torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64))
    x = torch.ones(1, 4000, 1, dtype=torch.float64)
    assert 0.999 * m.norm_bound() < float(m.push(x).norm() / x.norm()) <= m.norm_bound()
