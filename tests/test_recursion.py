"""The recursion over positions: every way to compute it is the literal one, and its adjoint is autograd's."""

import pytest
import torch

from tensorlens_tl.algebra import DiagonalRecursion, Recursion
from tensorlens_tl.algebra.recursion import diagonal_scan, doubling, fastest, prefix, scan, sequential

pytestmark = pytest.mark.numeric
WAYS = {way.__name__: way for way in (sequential, prefix, doubling, fastest, scan)}


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def of_radius(radius, width=8):
    """A step whose powers shrink by this factor."""
    return radius * torch.linalg.qr(normal(width, width))[0]


def literal(x, step):
    """y_i = x_i + step(i, y_{i−1}), as printed."""
    rows = []
    for position in range(x.shape[-2]):
        rows.append(x[..., position, :] + (step(position, rows[-1]) if rows else 0))
    return torch.stack(rows, dim=-2)


@pytest.mark.parametrize("pos", [1, 2, 3, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_literal_one(way, pos):
    x, weight = normal(2, 3, pos, 8), of_radius(0.99)
    expected = literal(x, lambda _, y: y @ weight)
    assert float((WAYS[way](x, weight) - expected).norm() / expected.norm()) <= 1e-12
    narrow = WAYS[way](x.float(), weight.float())
    assert float((narrow - expected).norm() / expected.norm()) <= 1e-5


@pytest.mark.parametrize("pos", [1, 2, 9, 64])
def test_factors_by_position(pos):
    x, factor = normal(3, 2, pos, 6), normal(2, pos, 6)
    expected = literal(x, lambda i, y: factor[:, i] * y)
    assert float((diagonal_scan(x, factor) - expected).norm() / expected.norm()) <= 1e-12
    m = DiagonalRecursion(factor.view(2, pos, 2, 3))
    assert torch.equal(m.push(x), diagonal_scan(x, factor))


def test_against_the_block_bidiagonal_solve():
    """Whitening as the paper derives it (Eq. 8): W = L⁻¹X with L block bidiagonal."""
    pos, width = 9, 5
    L, M = 0.3 * normal(width, width) + 2 * torch.eye(width), 0.3 * normal(width, width)
    big = torch.block_diag(*[L] * pos)
    for i in range(1, pos):
        big[i * width : (i + 1) * width, (i - 1) * width : i * width] = M
    x = normal(1, pos, width)
    inverse = torch.linalg.inv(L)
    made = scan(x @ inverse.T, -(inverse @ M).T)
    assert float((made.flatten() - torch.linalg.solve(big, x.flatten())).abs().max()) <= 1e-12


def test_gradients_once_and_twice():
    for pos in (1, 2, 7):
        x, weight = normal(2, pos, 4).requires_grad_(), (0.3 * normal(4, 4)).requires_grad_()
        assert torch.autograd.gradcheck(scan, (x, weight))
        assert torch.autograd.gradgradcheck(scan, (x, weight))
    loss = scan(x.detach(), weight).square().sum()
    assert torch.autograd.grad(loss, weight)[0].shape == (4, 4)


def test_the_adjoint_is_autograds():
    keep = torch.tensor([[False, False, True, True, True, True], [True, True, True, True, False, True]])
    maps = [Recursion(of_radius(0.9, 4)), Recursion(of_radius(0.9, 4), keep), DiagonalRecursion(normal(2, 6, 2, 2))]
    for m in maps:
        x = normal(2, 6, 4).requires_grad_()
        g = normal(2, 6, 4)
        assert torch.allclose(torch.autograd.grad((m.push(x) * g).sum(), x)[0], m.pull(g), atol=1e-12)
        jacobian = torch.autograd.functional.jacobian(m.push, x.detach())
        later = torch.arange(6)[:, None] < torch.arange(6)
        assert not jacobian.permute(0, 3, 1, 4, 2, 5)[:, :, later].any()  # no position hears of a later one
        largest = float(torch.linalg.matrix_norm(jacobian.reshape(48, 48), 2))
        assert largest <= m.norm_bound() < 10 * largest
    padded = maps[1].push(normal(2, 6, 4))
    assert not padded[~keep].any()


def test_a_step_that_grows_has_no_bound():
    assert Recursion(of_radius(1.01)).norm_bound() == float("inf")
    assert Recursion(of_radius(0.5)).norm_bound() == pytest.approx(2.0, rel=1e-6)


def test_rows_are_independent_and_dtype_stays():
    for rows in ((), (1,), (3, 2)):
        x, weight = normal(*rows, 2, 21, 8), of_radius(0.7)
        assert torch.allclose(scan(x, weight)[..., 1, :, :], scan(x[..., 1:2, :, :], weight)[..., 0, :, :], atol=1e-13)
    assert scan(x.to(torch.bfloat16), weight.to(torch.bfloat16)).dtype == torch.bfloat16
