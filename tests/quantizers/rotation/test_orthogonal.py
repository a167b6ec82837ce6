"""Hadamard transforms of all sizes are orthogonal, spread channels evenly, and do not depend on threads."""

import pytest
import torch

from aiakq.quantizers.rotation.orthogonal import hadamard_matrix, orthogonal_of, random_hadamard

SIZES = (1, 2, 6, 12, 25, 28, 36, 52, 64, 96, 100, 140, 172, 288)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("n", [4, 12, 20, 24, 28, 36, 44, 60, 76, 84, 108, 140, 180])
def test_paley_matrices_are_hadamard_matrices(n: int) -> None:
    matrix = hadamard_matrix(n)
    assert matrix is not None
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, n * torch.eye(n, dtype=torch.float64))
    assert bool((matrix[:, 0] == 1).all())


@pytest.mark.parametrize("n", [3, 7, 10, 25, 52, 172])
def test_sizes_without_a_construction_have_no_matrix(n: int) -> None:
    assert hadamard_matrix(n) is None


@pytest.mark.parametrize("n", SIZES)
def test_a_hadamard_transform_of_any_size_is_orthogonal(n: int) -> None:
    matrix = random_hadamard(n, generator()).apply(torch.eye(n))
    assert torch.allclose(matrix @ matrix.T, torch.eye(n), atol=1e-5)


@pytest.mark.parametrize("n", SIZES)
def test_a_transform_for_layer_norms_keeps_the_vector_of_ones(n: int) -> None:
    matrix = random_hadamard(n, generator(), keeps_ones=True).apply(torch.eye(n))
    assert torch.allclose(matrix @ matrix.T, torch.eye(n), atol=1e-5)
    assert torch.allclose(torch.ones(n) @ matrix, torch.ones(n), atol=1e-5)


@pytest.mark.parametrize("n", [12, 28, 64, 96, 288])
def test_every_channel_is_spread_evenly_where_a_hadamard_matrix_is_known(n: int) -> None:
    matrix = random_hadamard(n, generator()).apply(torch.eye(n))
    assert torch.allclose(matrix.abs(), torch.full((n, n), n**-0.5), atol=1e-6)


def test_seeds_give_different_signs() -> None:
    one, two = (random_hadamard(64, generator(seed)).apply(torch.eye(64)) for seed in (0, 1))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("keeps_ones", [False, True])
def test_a_rotation_is_restored_from_its_tensors(keeps_ones: bool) -> None:
    rotation = random_hadamard(24, generator(), keeps_ones)
    x = torch.randn(5, 24, generator=generator())
    assert torch.equal(orthogonal_of(rotation.tensors()).apply(x), rotation.apply(x))


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    x = torch.randn(300, 288, generator=generator())
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(random_hadamard(288, generator()).apply(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
